"""vLLM's engine in this process, which one thread steps; all accesses to it are here."""

import gc
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from bebop.errors import UserError, one_line
from bebop.model.fingerprint import fingerprint
from bebop.model.routing import Routers, of_server
from bebop.rollout.engine import EngineDied
from bebop.rollout.served_engine import OutputChunk
from bebop.rollout.served_weights import Sums
from bebop.rollout.vllm.arguments import refuse_version, sampling_arguments
from bebop.rollout.vllm.plugin import CPU, RUNNER, register
from bebop.rollout.vllm.steps import STEPS, StepCounts, StepRecord
from bebop.rollout.vllm.suffixes import Suffixes, suffix_cache
from bebop.trajectory import FinishReason, SamplingParams


@dataclass(slots=True, kw_only=True)
class _Answer:
    """Tokens of an open request so far.

    vLLM's outputs hold only what a step added, and those of an aborted request hold nothing.
    """

    name: str  # of the request in vLLM
    prompt: tuple[int, ...]
    counts: StepCounts
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    greedy: bool
    routers: Routers | None = None  # whose choices vLLM records
    experts: Any = None  # [N - 1, layers, k] of a completion that ended
    cached: int  # as in ``OutputChunk``

    def part(self, reason: FinishReason, why: object) -> OutputChunk:
        """Return the completion so far as a chunk."""
        logprobs = [0.0] * len(self.logprobs) if self.greedy else self.logprobs  # the greedy distribution has log p = 0
        return OutputChunk(
            token_ids=np.asarray(self.token_ids, dtype=np.int64),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.asarray(self.versions, dtype=np.int64),
            reason=reason,
            stats=self.counts.sums,
            why=why,
            routing=None if self.routers is None or self.experts is None else of_server(self.experts, self.routers),
            cached=self.cached,
        )


class Core:
    """``LLMEngine`` with its open requests, numbered here, and the version of its weights."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        environment: Mapping[str, str],
        *,
        drafts: int,
        head: bool,
        past: int | None = None,
        passes: int | None = None,
        routers: Routers | None = None,
    ) -> None:
        """Keep the arguments for starting the engine.

        Args:
            arguments: of ``vllm.EngineArgs``.
            environment: set for this process, before vLLM is imported.
            drafts: per cycle, 0 for plain decoding.
            head: whether a model drafts.
            past: tokens of other completions that drafts may come from; None: no drafts from completions.
            passes: of the drafter in a cycle; None: one for each draft.
            routers: of the model, if vLLM records their choices.
        """
        self.arguments, self.environment, self.drafts, self.head = dict(arguments), dict(environment), drafts, head
        self.limit, self.passes, self.routers = past, passes, routers
        self.past: Suffixes | None = None
        self.engine: Any = None
        self._versions = [(0, 0)]  # launches of steps from which on weights have a version
        self._open: dict[str, _Answer] = {}
        self._count = 0
        self._salt = ""  # keys and values are found again under this alone: never those of other weights

    def start(self) -> None:
        """Load the model; raise ``UserError`` if vLLM refuses its arguments."""
        os.environ.update(self.environment)
        if self.environment.get(CPU) == "1" and self.environment.get(RUNNER) == "1":
            from bebop.rollout.vllm.cpu import interpret

            interpret()
        import vllm
        from vllm import EngineArgs, LLMEngine

        refuse_version(vllm.__version__)
        register()  # vLLM would, where it finds bebop's entry point; here everything runs in this process
        set_num_threads = torch.set_num_threads
        try:
            self.engine = LLMEngine.from_engine_args(EngineArgs(**self.arguments))
        except (ValueError, TypeError, AssertionError) as error:  # arguments that do not fit together, or not the model
            raise UserError(f"vLLM refuses its arguments: {one_line(error)}") from error
        except (RuntimeError, OSError, KeyError) as error:
            raise EngineDied(f"vLLM did not start: {one_line(error)}") from error
        finally:
            torch.set_num_threads = set_num_threads  # vLLM puts a function in its place that does nothing
        if self.limit is not None:
            self.past = Suffixes(self.engine.collective_rpc(suffix_cache)[0], self.limit)
        self._salted()

    @property
    def unfinished(self) -> int:
        """Return the number of open requests."""
        return len(self._open)

    def add(self, token_ids: Sequence[int], params: SamplingParams, fresh: int, **more: Any) -> str:
        """Queue a request for ``fresh`` more tokens, with ``more`` parameters; return the name of its outputs."""
        from vllm import SamplingParams as Theirs
        from vllm.sampling_params import RequestOutputKind

        self._count += 1
        key = f"bebop-{self._count:x}"
        arguments = sampling_arguments(params, fresh) | more
        theirs = Theirs(**arguments, output_kind=RequestOutputKind.DELTA)
        prompt = {"prompt_token_ids": list(token_ids), "cache_salt": self._salt}
        try:
            name = self.engine.add_request(key, prompt, theirs)
        except ValueError as error:
            raise UserError(f"vLLM refuses a request: {one_line(error)}") from error
        counts = StepCounts(drafts=self.drafts, head=self.head, passes=self.passes)
        greedy, routers = params.temperature == 0, self.routers
        self._open[key] = _Answer(
            name=name,
            prompt=tuple(token_ids),
            counts=counts,
            greedy=greedy,
            routers=routers,
            cached=self._versions[-1][1],
        )
        return key

    def step(self) -> list[tuple[str, OutputChunk]]:
        """Run one step of vLLM; return the requests that ended."""
        finished = []
        outputs, record = self.outputs()
        for output in outputs:
            answer, given = self._open[output.request_id], output.outputs[0]
            self._take(answer, given, record)
            if output.finished:
                self._ended(self._open.pop(output.request_id))
                finished.append((output.request_id, answer.part(_reason(given.finish_reason), given)))
        return finished

    def outputs(self) -> tuple[list[Any], StepRecord]:
        """Run one step; return vLLM's own outputs, and the plugin's record of the step that they come from.

        With asynchronous scheduling that is the step before, and the first has no outputs.
        """
        try:
            outputs = self.engine.step()
        except Exception as error:  # it may have decoded half of a step: its state is unknown
            raise EngineDied(f"a step of vLLM failed: {type(error).__name__}: {one_line(error)}") from error
        return outputs, STEPS.take()

    def _take(self, answer: _Answer, given: Any, record: StepRecord) -> None:
        ids = list(given.token_ids)
        answer.token_ids += ids
        answer.logprobs += [row[id].logprob for row, id in zip(given.logprobs or [], ids, strict=True)]
        answer.versions += [self._version_of(record)] * len(ids)
        # Read at once: vLLM has waited for tokens that were copied after these numbers, and their memory is pinned.
        answer.counts.add(len(ids), record.verified().get(answer.name))
        answer.experts = given.routed_experts  # with the last output of a request alone

    def _version_of(self, record: StepRecord) -> int:
        """Return the version of the weights that a step was launched with; its tokens may come out after an update."""
        newest = self._versions[-1][1]
        return next((version for launch, version in reversed(self._versions) if launch <= record.number), newest)

    def abort(self, key: str) -> OutputChunk | None:
        """End a request; return its completion so far (vLLM returns nothing), or None if it had ended."""
        answer = self._open.pop(key, None)
        if answer is None:
            return None
        self.engine.abort_request([answer.name], internal=True)
        self._ended(answer)
        return answer.part("abort", "aborted")

    def _ended(self, answer: _Answer) -> None:
        if self.past is not None:
            self.past.ended(answer.name, answer.prompt, len(answer.token_ids))

    def load(self, role: str, place: Mapping[str, Any]) -> None:
        """Load weights of one model, ``target`` or ``draft``; ``place`` as in ``transfer_engine.py``."""
        start = "start_weight_update" if role == "target" else "start_draft_weight_update"
        try:
            for call, arguments in ((start, ()), ("update_weights", (dict(place),)), ("finish_weight_update", ())):
                self.engine.collective_rpc(call, args=arguments)
        except Exception as error:  # layers may be half old, half new
            raise EngineDied(
                f"vLLM did not take weights of the {role}: {type(error).__name__}: {one_line(error)}"
            ) from error

    def loaded(self, version: int, recompute: bool) -> None:
        """Record the version of new weights; ``recompute``: compute open requests' keys and values again."""
        self._versions = [*self._versions[-7:], (STEPS.launches, version)]
        self._salted()
        if recompute:
            self.engine.reset_prefix_cache(reset_running_requests=True)
            for answer in self._open.values():
                answer.counts.restarted()

    def _salted(self) -> None:
        self._salt = f"{id(self):x}-{self._versions[-1][1]}-{self._count}"

    def checksums(self) -> Sums:
        """Return checksums of both models' parameters; shared parameters count as the target's."""
        found: Sums = self.engine.collective_rpc(checksums)[0]
        return found

    def close(self) -> None:
        """End the engine, and free its memory."""
        if self.engine is None:
            return
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        engine, self.engine = self.engine, None
        with suppress(Exception):  # whatever state it is in
            engine.engine_core.shutdown()
        del engine
        cleanup_dist_env_and_memory()
        gc.collect()


def checksums(worker: Any) -> dict[str, dict[str, str]]:
    """Return checksums by role and name; it runs in vLLM's worker."""
    target = dict(worker.model_runner.get_model().named_parameters())
    found = {"target": {name: fingerprint({name: tensor}) for name, tensor in target.items()}}
    draft = worker.model_runner.get_draft_model()
    if draft is not None:
        shared = {tensor.data_ptr() for tensor in target.values()}
        own = {name: tensor for name, tensor in draft.named_parameters() if tensor.data_ptr() not in shared}
        found["draft"] = {name: fingerprint({name: tensor}) for name, tensor in own.items()}
    return found


def _reason(reason: object) -> FinishReason:
    if reason == "stop" or reason == "length":
        return reason
    raise EngineDied(f"vLLM ended a completion for {reason!r}")
