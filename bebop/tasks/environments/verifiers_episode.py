"""verifiers 0.4 environments for the agent loop, which still asks the policy turn by turn.

A verifiers environment drives the conversation itself and requests tokens from a server (``verifiers_client``). This
module inverts that: the rollout is a task of the event loop, and each of its requests waits. ``reset`` returns the
tokens of the first request. ``step`` receives the policy's completion, answers the request with it, and returns the
tokens that the next request adds. The end of the task is the end of the trajectory, with its reward.

So it uses tokens on both sides (``EnvironmentKind.tokens``): those of verifiers' renderer with ``tokenizer``, which has
to be the policy's. A trajectory has exactly the tokens that verifiers posted; one that removes or changes a token is
refused. The job decides on sampling; an environment's own temperature or length is ignored. The reward comes at the
end: a trajectory that the job truncates earns 0. verifiers itself ends and scores at ``max_turns``, so that should not
exceed ``task.environment.max_turns``.

The libraries are imported when the first episode begins, not with this module.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from bebop.errors import UserError
from bebop.tasks.environment import EnvStep
from bebop.trajectory import Completion

if TYPE_CHECKING:
    from bebop.tasks.environments.verifiers_client import VerifiersHost, VerifiersRollout

Sampled = tuple[Sequence[int], Sequence[float], str]  # ids, a log-prob each, "stop" or "length"


class _Shared:
    """Host shared by all episodes with the same arguments in an event loop; it serves while any of them is open."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.args = args
        self.host: VerifiersHost | None = None
        self.users = 0
        self.lock = asyncio.Lock()

    async def enter(self) -> "VerifiersHost":
        """Return the host, which serves from now on; raise ``UserError`` if it cannot."""
        async with self.lock:
            if self.host is None:
                self.host = await asyncio.to_thread(self._load)  # may take long and must not block other environments
            if self.users == 0:
                await self.host.__aenter__()
            self.users += 1
            return self.host

    def _load(self) -> "VerifiersHost":
        if any(find_spec(name) is None for name in ("verifiers", "renderers")):
            raise UserError("environment verifiers needs the library of this name: pip install -e '.[agents]'")
        from bebop.tasks.environments.verifiers_client import VerifiersHost

        return VerifiersHost(**self.args)

    async def leave(self) -> None:
        """Leave the host, which stops after the last episode."""
        async with self.lock:
            self.users -= 1
            if self.users == 0 and self.host is not None:
                await self.host.__aexit__(None, None, None)


_SHARED: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, _Shared]] = WeakKeyDictionary()


class Verifiers:
    """Episode of a verifiers environment; a ``TokenEnvironment``."""

    def __init__(
        self,
        *,
        taskset: str,
        tokenizer: str,
        environment: str = "",
        taskset_args: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
        max_turns: int | None = None,
        renderer: str = "",
    ) -> None:
        """Store the settings without starting anything.

        taskset, environment: ids of installed packages ("": the taskset's own environment), with the arguments
        taskset_args and settings. tokenizer: the policy's folder. renderer: a name of the ``renderers`` library, such
        as qwen3; "": the chat template. max_turns: the number of turns after which verifiers ends and scores.
        """
        args = {
            "taskset": taskset,
            "tokenizer": tokenizer,
            "environment": environment,
            "args": dict(taskset_args or {}),
            "settings": dict(settings or {}),
            "max_turns": max_turns,
            "renderer": renderer,
        }
        key = json.dumps(args, sort_keys=True, default=str)
        self._shared = _SHARED.setdefault(asyncio.get_running_loop(), {}).setdefault(key, _Shared(args))
        self._entered = False
        self._rollout: asyncio.Task[VerifiersRollout] | None = None
        self._asked: asyncio.Queue[list[int] | None] = asyncio.Queue()  # requested tokens; None: it has ended
        self._answer: asyncio.Future[Sampled] | None = None  # of the request that waits
        self._history: list[int] = []

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[int, ...]:
        """Return the tokens of the first request; raises ``UserError``. verifiers takes no seed: its tasks are
        numbered.
        """
        host = await self._shared.enter()
        self._entered = True
        self._rollout = asyncio.create_task(host.rollout(item["index"], self._generate))
        self._rollout.add_done_callback(lambda _: self._asked.put_nowait(None))
        first = await self._asked.get()
        if first is None:
            self._rollout.result()
            raise UserError(f"verifiers task {item['index']} ended before the policy was asked for anything")
        self._history = first
        return tuple(first)

    async def step(self, completion: Completion) -> EnvStep:
        """Return the tokens that the next request adds to history and this turn, or the end with the total reward."""
        assert self._rollout is not None and self._answer is not None, "it was begun, and a request waits"
        sampled = completion.token_ids.tolist()
        self._history += sampled
        self._answer.set_result((sampled, completion.logprobs.tolist(), completion.finish_reason))
        ids = await self._asked.get()
        if ids is None:
            rollout = self._rollout.result()
            return EnvStep(reward=rollout.reward, done=True, counts=rollout.metrics)
        added, self._history = ids[len(self._history) :], ids
        return EnvStep(messages=tuple(added))

    async def close(self) -> None:
        """End the rollout, whatever its state."""
        rollout, self._rollout = self._rollout, None
        if rollout is not None:
            rollout.cancel()
            await asyncio.wait({rollout})
            if not rollout.cancelled():
                rollout.exception()  # retrieved, so asyncio does not warn: it was raised already, or does not matter
        if self._entered:
            self._entered = False
            await self._shared.leave()

    async def _generate(self, ids: Sequence[int], params: Mapping[str, Any]) -> Sampled:
        """Answer a request of the rollout; its history was already compared with the fed and sampled tokens."""
        self._answer = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(list(ids))
        return await self._answer


def item(index: int, seed: int) -> dict[str, Any]:
    """Return question ``index``: tasks come in the taskset's order, which repeats after the last."""
    return {"index": index}
