"""An engine in a process of its own, whose memory is free again when that process has ended.

- Calls are served one after another, in their order. An exception in that process is raised here.
- Settings of the engine for its process (environment, threads, patches, Triton's interpreter) stay in that process.
- The process ends when it is closed, and when this one is gone.
"""

import multiprocessing
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig, JobConfig
from bebop.errors import UserError, one_line
from bebop.rollout.engine import EngineDied, Finished, Request
from bebop.rollout.engines import engine_module

CLOSE_SECONDS = 60.0  # for the engine to end by itself
# Variables that torchrun sets for its processes: with them an engine would join their group.
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip


class EngineProcess:
    """The engine of a job as an ``Engine``, for jobs without drafts from a head: there is no fingerprint of one."""

    version, head, redrawn = 0, "", 0

    def __init__(self, config: JobConfig, gpu: int | None = None) -> None:
        """Start the process and wait until the engine is ready.

        Args:
            config: names the engine, in ``rollout``.
            gpu: the only one that the engine sees, counted among those of this process; None: it sees all of them.

        Raises:
            UserError: The engine refuses the job.
            EngineDied: It does not start.
        """
        self.name, self._open = config.rollout.engine, 0
        # Forked processes cannot use CUDA. The process is no daemon, since those cannot have processes of their own.
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(config, gpu, theirs), name=f"engine-{self.name}")
        self._process.start()
        theirs.close()
        try:
            self._reply()
        except BaseException:
            self.close()
            raise

    @property
    def unfinished(self) -> int:
        """Return the number of requests queued or running."""
        return self._open

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._call("add", request)
        self._open += 1

    def step(self) -> list[Finished]:
        """Return the requests that ended since the last step."""
        return self._ended(self._call("step"))

    def abort(self, ids: Sequence[int] | None = None) -> list[Finished]:
        """End requests now, all of them if ``ids`` is None; return them."""
        return self._ended(self._call("abort", ids))

    def stage(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return the weights as they are."""
        return weights

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace weights in flight."""
        self._call("load_weights", weights, version)
        self.version = version

    def configure(self, decoding: DecodingConfig) -> None:
        """Use another decoding configuration from the next cycle on."""
        self._call("configure", decoding)

    def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Send past completions of a prompt to the engine."""
        self._call("remember", prompt, answers)

    def close(self) -> None:
        """End the engine and wait for its process to be gone; a hung one is killed."""
        self._pipe.close()
        self._process.join(CLOSE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ended(self, finished: list[Finished]) -> list[Finished]:
        self._open -= len(finished)
        return finished

    def _call(self, name: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((name, arguments))
        except OSError as error:
            raise EngineDied(f"the process of {self.name} is gone: {one_line(error)}") from error
        return self._reply()

    def _reply(self) -> Any:
        """Return the reply of the process, or raise the error that it sent."""
        try:
            reply, error = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(CLOSE_SECONDS)
            raise EngineDied(f"the process of {self.name} ended with code {self._process.exitcode}") from None
        if error is not None:
            raise error
        return reply


def _serve(config: JobConfig, gpu: int | None, pipe: Connection) -> None:
    """Make the engine, then serve calls until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches both: the other process puts things away
    for name in [n for n in os.environ if n in RANK_VARIABLES or n.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    if gpu is not None:
        seen = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = seen[gpu] if seen else str(gpu)
    torch.set_num_threads(config.rollout.threads)
    torch.manual_seed(config.runtime.seed)
    try:
        engine: Any = engine_module(config).make(config)[0]
    except (UserError, EngineDied) as error:
        pipe.send((None, error))
        return
    raised: Exception | None
    try:
        pipe.send((None, None))
        while True:
            name, arguments = pipe.recv()
            try:
                reply, raised = getattr(engine, name)(*arguments), None
            except (UserError, EngineDied) as error:
                reply, raised = None, error
            pipe.send((reply, raised))
    except (EOFError, OSError):  # nobody asks any more
        pass
    finally:
        if hasattr(engine, "close"):  # the embedded engine has nothing but memory
            engine.close()
