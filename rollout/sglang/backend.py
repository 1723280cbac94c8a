"""An SGLang engine as the adapter sees it, wherever it runs; and the one inside this process."""

import asyncio
import logging
import multiprocessing
import os
from collections.abc import Mapping
from typing import Any, Protocol

from bebop.errors import UserError, one_line
from bebop.rollout.engine import EngineDied
from bebop.rollout.heartbeat import Heartbeat
from bebop.rollout.sglang.arguments import refuse_version
from bebop.runtime.processes import stopped
from bebop.runtime.watchdog import SuspendAwareClock

log = logging.getLogger(__name__)
Reply = dict[str, Any]
# One intermediate report would cut the plugin's entries, which are per verification step, at a number of tokens.
WHOLE_ANSWERS = {"SGLANG_FORCE_STREAM_INTERVAL": str(1 << 30)}
# On a CPU. Without the last, 64 programs a row look for the largest of a handful of numbers: half of the time.
INTERPRETER = {"TRITON_INTERPRET": "1", "BEBOP_SGLANG_CPU": "1", "SGLANG_OPT_USE_GUMBEL_SAMPLE": "0"}
STRUCTS = {  # control calls, as SGLang's HTTP server names them, and their argument types
    "pause_generation": "PauseGenerationReqInput",
    "continue_generation": "ContinueGenerationReqInput",
    "begin_weight_update": "BeginWeightUpdateReqInput",
    "end_weight_update": "EndWeightUpdateReqInput",
    "update_weights_from_tensor": "UpdateWeightsFromTensorReqInput",
    "update_weights_from_distributed": "UpdateWeightsFromDistributedReqInput",
    "update_weights_from_disk": "UpdateWeightFromDiskReqInput",
    "update_weight_version": "UpdateWeightVersionReqInput",
    "init_weights_update_group": "InitWeightsUpdateGroupReqInput",
    "weights_checker": "CheckWeightsReqInput",
    "release_memory_occupation": "ReleaseMemoryOccupationReqInput",
    "resume_memory_occupation": "ResumeMemoryOccupationReqInput",
}
METHODS = {"weights_checker": "check_weights"}  # where the engine's own name is another


class Backend(Protocol):
    """Requests and control calls; every call raises ``EngineDied`` if the server is gone."""

    async def start(self) -> None:
        """Make it ready; called again, bring it back."""

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Answer one request: ``output_ids`` and ``meta_info``."""

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Make a call of ``STRUCTS``, or ``abort_request``; a reply with ``success`` false raises ``EngineDied``."""

    def dead(self) -> str | None:
        """Return why it is known to be dead; None: it is not."""

    async def close(self) -> None:
        """End the processes that were started."""


class LocalBackend:
    """``sglang.Engine`` in this process, its scheduler in child processes."""

    def __init__(self, arguments: Mapping[str, Any], environment: Mapping[str, str], hang_after: float = 30.0) -> None:
        """``environment`` is set for SGLang's processes, and hence for this one; ``hang_after`` as in ``runtime``."""
        self.arguments, self.environment = dict(arguments), dict(environment)
        self.engine: Any = None
        self.children: set[int] = set()
        self.heart = Heartbeat(
            "SGLang's scheduler", lambda: self.engine.tokenizer_manager.get_internal_state(), hang_after
        )
        self._stopped: dict[int, SuspendAwareClock] = {}  # a child that is stopped, and since when

    async def start(self) -> None:
        """Load the model. Blocks the event loop, which SGLang binds to."""
        os.environ.update(WHOLE_ANSWERS | self.environment)
        import sglang

        refuse_version(sglang.__version__)
        before = _children()
        try:
            self.engine = sglang.Engine(**self.arguments)
        except (ValueError, AssertionError) as error:  # arguments that do not fit together, or not the model
            raise UserError(f"SGLang refuses its arguments: {one_line(error)}") from error
        except (RuntimeError, OSError) as error:
            raise EngineDied(f"SGLang did not start: {one_line(error)}") from error
        self.children = _children() - before
        # SGLang's own watchdog would end this process; here a dead child is noticed by ``dead``.
        watchdog = getattr(self.engine.tokenizer_manager, "_subprocess_watchdog", None)
        if watchdog is not None:
            watchdog.stop()
        self.heart.start()

    async def generate(self, payload: Mapping[str, Any]) -> Reply:
        """Answer one request, below ``Engine.async_generate``, which does not pass every field on."""
        from sglang.srt.managers.io_struct import GenerateReqInput

        request = self.engine.tokenizer_manager.generate_request(GenerateReqInput(**payload), None)

        async def answer() -> Reply:
            output: Reply = await anext(request)
            return output

        return await self.heart.answer(answer())

    async def control(self, name: str, payload: Mapping[str, Any]) -> Reply:
        """Make a control call within its deadline."""
        manager = self.engine.tokenizer_manager
        if name == "abort_request":
            manager.abort_request(**payload)
            return {"success": True}
        from sglang.srt.managers import io_struct

        call = getattr(manager, METHODS.get(name, name))(getattr(io_struct, STRUCTS[name])(**payload))
        found = await self.heart.control(name, call)
        values = found if isinstance(found, tuple) else ()
        reply = dict(zip(("success", "message", "ranks"), values, strict=False)) or {"success": True}
        return checked(name, reply)

    def dead(self) -> str | None:
        """Return why a process of SGLang's counts as dead; None: none does."""
        if gone := self.children - _children():
            return f"SGLang's process {min(gone)} ended"
        self._stopped = {pid: self._stopped.get(pid, SuspendAwareClock()) for pid in self.children if stopped(pid)}
        for pid, clock in self._stopped.items():
            clock.tick()
            if clock.read() > self.heart.floor:
                return f"SGLang's process {pid} is stopped for {clock.read():.0f} s"
        return self.heart.why

    async def close(self) -> None:
        """End SGLang's processes; SGLang ends every child of this process with them."""
        self.heart.close()
        if self.engine is not None:
            await asyncio.to_thread(self.engine.shutdown)
            self.engine = None


def checked(name: str, reply: Reply) -> Reply:
    """Return the reply of a control call; raise ``EngineDied`` unless it says that all went well."""
    if not reply.get("success", True):
        raise EngineDied(f"{name} failed: {one_line(reply.get('message'))}")
    return reply


def _children() -> set[int]:
    return {process.pid for process in multiprocessing.active_children() if process.pid is not None}
