"""The embedded engine: continuous batching over slots, speculative cycles, weights swapped in flight; torch alone.

With ``overlap`` a cycle is launched before the results of the one before are read, so that the device does not wait for
the host. A row that ended in the first is in the second once more, where it emits nothing and keeps everything that its
completion is made of (``DraftVerify.freezes``). Slots are freed and reused a cycle later than without. Tokens,
statistics and the order of completions are the same. Calls that end or change requests first read the cycle in flight.
"""

import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from itertools import count

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.config.engines import PREFILL_TOKENS
from bebop.config.job import PARKED_BYTES, DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy, staged
from bebop.rollout.capacity import bytes_of_graphs, check_memory, check_parked, check_pool, check_positions
from bebop.rollout.decoding.base import Decoder
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.graphs import Graphs, Recorder
from bebop.rollout.decoding.timed_lengths import TimedLength
from bebop.rollout.decoding.verify_trace import Tracer
from bebop.rollout.detokenize import CompletionText, completed_at
from bebop.rollout.engine import Engine, Finished, Request, nothing
from bebop.rollout.flight import NONE, Flight, event_of
from bebop.rollout.kv_retention import KvRetention
from bebop.rollout.prefill import Admission
from bebop.rollout.routing import RoutingTable
from bebop.rollout.slots import Slots, SlotSizes
from bebop.systems import SYSTEMS
from bebop.trajectory import OPENING, Completion, DecodeStats, FinishReason, SamplingParams, add_stretches

TURNS = 5  # cycles of each kind that are timed
CONTEXT = 64  # tokens before them; less where that does not fit

log = logging.getLogger(__name__)


class TorchEngine:
    """The embedded engine. Prompts shared by a group are run once; finished rows are refilled before every cycle."""

    redrawn = 0  # it loses no request

    def __init__(
        self,
        policy: Policy,
        decoding: DecodingConfig,
        *,
        slots: int = 32,
        max_length: int = 512,
        on_update: str = "keep",
        measure: bool = True,
        room: int = 0,
        keep_state: bool = False,
        parked_bytes: int = PARKED_BYTES,
        paged: bool | None = None,
        cache_tokens: int | None = None,
        prefill_tokens: int = PREFILL_TOKENS,
        clock: Callable[[], float] = time.perf_counter,
        recorder: Recorder | None = None,
        overlap: bool = False,
        batch_invariant: bool = False,
        record_routing: bool = False,
    ) -> None:
        """Allocate slots and caches; with ``draft_tokens=auto`` time cycles.

        Args:
            on_update: keep or recompute keys and values of running requests when weights change.
            measure: whether overlap and entropies are collected beside counts.
            room: drafts that a later ``configure`` may want, whether or not the system drafts now; its own always fit.
            keep_state: finished completions, too, hold ``Completion.state``.
            parked_bytes: for caches of completions whose requests have ``park`` set.
            paged: whether keys and values lie in pages that all requests share; None: on a CUDA device.
            cache_tokens: tokens in the pages, perhaps too few for all slots; None: all slots at their full length.
            prefill_tokens: most tokens that a pass over new contexts computes, padding included.
            clock: gives seconds, for ``draft_tokens=auto``; read now and at every cycle.
            recorder: makes CUDA graphs of cycles; None: cycles are launched kernel by kernel.
            overlap: a cycle is launched before the one before is read, unless its results are needed first.
            batch_invariant: every cycle is computed for all slots and their whole length; needs a recorder.
            record_routing: all completions hold their routing.
        """
        self.policy, self.decoding, self.text = policy, decoding, CompletionText(policy.tokenizer)
        self.on_update, self.keep_state = on_update, keep_state
        paged = policy.device.type == "cuda" if paged is None else paged
        more = 0 if recorder is None else _bytes_of_graphs(policy, decoding, slots)
        _check_sizes(policy, slots, max_length, cache_tokens, more)
        check_parked(parked_bytes, policy.device)
        check_pool(cache_tokens, max_length, paged)
        system = SYSTEMS[decoding.system]
        sizes = SlotSizes(
            slots=slots,
            length=max_length,
            drafts=max(decoding.limit if system.drafts else 0, room),
            vocab=policy.vocab_size,
            cache_tokens=cache_tokens if paged else 0,
        )
        self.slots = Slots(sizes, policy.device)
        self.starts = self.slots.starts.tolist()  # of stretches
        self.decoder: Decoder = system.decoder()(policy, self.slots, decoding)
        self.decoder.measure = measure
        self.routing = self._recorded_routing() if record_routing else None
        self.tracer = Tracer(system.drafter_name)
        self.retention = KvRetention(self.slots, parked_bytes)
        self.admission = Admission(self.slots, self.decoder, self.retention, prefill_tokens)
        self.clock = clock
        if recorder is not None:
            self._record(Graphs(recorder, slots, self.slots.capacity if batch_invariant else None))
        self.overlap = overlap
        self.flight: Flight | None = None
        self.side = torch.cuda.Stream(policy.device) if overlap and policy.device.type == "cuda" else None
        self._logged: set[str] = set()  # reasons
        if isinstance(self.decoder, DraftVerify):
            self.decoder.observers.append(self.tracer)
            self.decoder.freezes = overlap
            time_cycles(self.decoder, self.slots, clock)
        self.version, self.head = 0, self.policy.head_fingerprint()
        self.waiting: deque[Request] = deque()
        self.active: list[Request] = []  # the request in slot i
        self.fed: list[int] = []  # entries of each request in the caches, as of the latest cycle that was read
        self.ended: list[Finished] = []  # completions that ended where ``step`` could not return them
        self.turns: list[int] = []  # order in which requests came into slots: the latest is preempted first
        self._turns = count()
        self.preempted = 0  # requests that had to leave their pages to earlier ones, and began again

    def _recorded_routing(self) -> RoutingTable:
        if not isinstance(self.decoder, DraftVerify):
            system = self.decoding.system
            raise UserError(f"decoding.system={system!r} is not possible: its own cycle records no routing")
        return self.decoder.target.record_routing()

    def _record(self, graphs: Graphs) -> None:
        """Record cycles from now on, if the decoder supports it."""
        if isinstance(self.decoder, DraftVerify):
            self.decoder.graphs = graphs
        else:
            graphs.refuse(f"decoding.system={self.decoding.system} has a cycle of its own")

    @property
    def unfinished(self) -> int:
        """Return the number of requests queued, running, or ended and not returned yet."""
        return len(self.waiting) + len(self.active) + len(self.ended)

    def add(self, request: Request) -> None:
        """Queue a request."""
        need, room = len(request.token_ids) + request.params.max_new_tokens, self.slots.sizes.length
        if need > room:
            raise UserError(f"a prompt of {len(request.token_ids)} tokens + max_new_tokens exceeds max_length={room}")
        if not request.token_ids:
            raise UserError("an empty prompt cannot be continued: give at least one token")
        rows = self.slots.sizes.vocab
        if wrong := next((token for token in request.token_ids if not 0 <= token < rows), None):
            raise UserError(f"a prompt holds token {wrong}: the model has tokens 0 to {rows - 1}, give one of those")
        if len(request.params.stop_token_ids) > self.slots.sizes.stops:
            raise UserError(f"at most {self.slots.sizes.stops} stop tokens are possible")
        self.admission.check(request)
        self.waiting.append(request)

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Run one cycle for all active rows; return the finished requests, with overlap those of the cycle before."""
        self._grow()
        self._admit()
        ended, self.ended = self.ended, []
        if not self._runs_ahead():
            ended += self._settle()
            return ended + (self._read(self._launch()) if self.active else [])
        before, self.flight = self.flight, self._launch()
        ended += [] if before is None else self._read(before)
        if not self.flight.wanted:
            self.flight = None
        return ended

    def _runs_ahead(self) -> bool:
        """Return whether the next cycle may be launched before the latest is read; log each reason against it once."""
        if not (self.overlap and self.active):
            return False
        if not isinstance(self.decoder, DraftVerify):
            why = f"decoding.system={self.decoding.system} has a cycle of its own"
        elif any(request.params.stop for request in self.active):
            why = "requests have stop strings"
        else:
            why = self.decoder.why_read()
        if why and why not in self._logged:
            self._logged.add(why)
            log.warning("some cycles are read before the next one is launched: %s", why)
        return not why

    def _launch(self) -> Flight:
        """Launch a cycle of all active rows, and the copy of its results to the host."""
        batch, began, slots = len(self.active), self.clock(), self.slots
        if slots.pages is not None:
            slots.pages.upload()  # reading the cycle in flight may have moved rows
        launched = event_of(slots.device)
        done = self.decoder.cycle(batch, max(map(self._most, range(batch))), self.version)
        # The only thing in a cycle that the host waits for: the rows that are done, all lengths, the newest token. They
        # are a tensor of their own, since the next cycle writes on; on a GPU ``to`` gives pinned memory.
        results = torch.stack([done.long(), slots.fed[:batch], slots.last[:batch], slots.count[:batch]])
        results = results.to("cpu", non_blocking=True)
        arrived = event_of(slots.device)
        return Flight(results=results, launched=launched, arrived=arrived, rows=[*range(batch)], began=began)

    def _most(self, slot: int) -> int:
        """Return the most entries that a running request may have by now, including a cycle that is not read yet."""
        unread = self.flight is not None and self.flight.rows[slot] != NONE
        return self.fed[slot] + unread * (1 + self.slots.sizes.drafts)

    def _read(self, flight: Flight) -> list[Finished]:
        """Wait for the results of a cycle; return the requests that ended in it."""
        flags, fed, last, counts = flight.wait()
        if isinstance(self.decoder, DraftVerify):
            self.decoder.took(self.clock() - flight.began)
        rows = {slot: row for slot, row in enumerate(flight.rows) if row != NONE}
        for slot, row in rows.items():
            self.fed[slot] = fed[row]
        ended: dict[int, FinishReason] = dict.fromkeys(
            self._stop_strings({slot: counts[row] for slot, row in rows.items()}), "stop"
        )
        for slot, row in rows.items():
            if flags[row]:
                stopped = last[row] in self.active[slot].params.stop_token_ids
                ended.setdefault(slot, "stop" if stopped else "length")
        return self._finish(ended)

    def _settle(self) -> list[Finished]:
        """Read the cycle in flight, if there is one; return the requests that ended in it."""
        flight, self.flight = self.flight, None
        return [] if flight is None else self._read(flight)

    @torch.inference_mode()
    def abort(self, ids: Sequence[int] | None = None) -> list[Finished]:
        """End requests now, all of them if ``ids`` is None; return them.

        The result includes requests that ended by themselves before and were not returned yet.
        """
        ended, self.ended = [*self.ended, *self._settle()], []
        chosen = None if ids is None else set(ids)
        slots = [s for s, request in enumerate(self.active) if chosen is None or request.id in chosen]
        finished = self._finish(dict.fromkeys(slots, "abort"))
        for request in [r for r in self.waiting if chosen is None or r.id in chosen]:
            self.waiting.remove(request)
            finished.append(Finished(id=request.id, completion=request.partial or nothing()))
        return ended + finished

    @cached_property
    def staging(self) -> "torch.cuda.Stream | None":
        """Return the stream of all loads: memory allocated on one stream is reused only there."""
        return torch.cuda.Stream(self.policy.device) if self.policy.device.type == "cuda" else None

    def stage(self, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Copy weights to a GPU beside those in use, if its memory has room for twice their size."""
        return staged(weights, self.staging)

    @torch.inference_mode()
    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copy weights into place. Running requests continue on their old keys and values, or on recomputed ones."""
        self.ended += self._settle()
        self.policy.load(weights)
        self.version, self.head = version, self.policy.head_fingerprint()
        if self.on_update == "recompute":
            self.retention.clear()
            if self.active:
                self._recompute()

    @torch.inference_mode()
    def configure(self, decoding: DecodingConfig) -> None:
        """Use another decoding configuration from now on.

        The output distribution stays the same if both systems are exact.
        """
        now, then, room = SYSTEMS[self.decoding.system], SYSTEMS[decoding.system], self.slots.sizes.drafts
        if then.drafts and not 0 < decoding.limit <= room:
            raise UserError(
                f"decoding.draft_tokens={decoding.limit} is not possible now: the engine has room for {room}"
            )
        missing = [part for part in then.needs if part not in self.policy.parts]
        if missing:
            raise UserError(
                f"decoding.system={decoding.system!r} is not possible now: it needs the part {missing[0]!r}"
            )
        if then.separate and self.policy.draft is None:
            raise UserError(f"decoding.system={decoding.system!r} is not possible now: there is no model.draft")
        if then.decoder() is not now.decoder():
            raise UserError(f"decoding.system={decoding.system!r} is not possible now: its cycle is another one")
        self.ended += self._settle()
        if self.decoder.configure(decoding):
            self.retention.clear()
            if self.active:
                self._recompute()
        self.decoding, self.tracer.drafter = decoding, then.drafter_name

    def remember(self, prompt: Sequence[int], answers: Sequence[Iterable[int]]) -> None:
        """Store past completions of a prompt for new requests; running requests keep the history that they have."""
        self.slots.history.remember(prompt, answers)

    def _recompute(self) -> None:
        """Read the contexts of running requests again, with the current weights."""
        self.slots.release(0, len(self.active))
        # Requests of one prompt share no page of it any more, so that more may be needed than before.
        while self.slots.short([fed + self.slots.ahead for fed in self.fed]):
            self._preempt()
        held = None if self.routing is None else self.routing.table[:, : len(self.active)].clone()
        before = self.fed
        self.fed = self.admission.prefill(0, [self._context(slot) for slot in range(len(self.active))])
        if self.routing is not None and held is not None:
            for slot, entries in enumerate(before):
                self.routing.put_back(slot, held[:, slot, :entries])
        self.slots.oldest[: len(self.active)] = self.version

    def _grow(self) -> None:
        """Give running requests the pages that their next cycle writes to.

        If too few pages are free, it evicts parked caches, and then preempts the request that came last, which waits
        again. A cycle in flight may still write to a page that is taken back here. It ends before the next one begins,
        since both are in one stream.
        """
        while self.slots.short(self._entries()):
            if not self.retention.evict():
                self.ended += self._settle()  # what is preempted has to be known
                if self.slots.short(self._entries()):
                    self._preempt()
        self.slots.reserve(0, self._entries(), cycles=1)

    def _entries(self) -> list[int]:
        """Return the most entries that each running request may have by now."""
        return [self._most(slot) for slot in range(len(self.active))]

    def _preempt(self) -> None:
        """Put the request that came into its slot last back to the front of the queue, as an aborted one."""
        slot = max(range(len(self.active)), key=self.turns.__getitem__)
        request = self.active[slot]
        [stopped] = self._finish({slot: "abort"}, park=False)
        self.waiting.appendleft(dataclasses.replace(request, partial=stopped.completion))
        self.preempted += 1
        if self.preempted & (self.preempted - 1) == 0:  # the first, second, fourth, eighth
            log.warning(
                "%d times a request had to wait again for want of pages; a larger rollout.torch.cache_tokens, or fewer "
                "rollout.slots, would spare reading its context once more",
                self.preempted,
            )

    def _admit(self) -> None:
        """Fill free slots from the queue."""
        able = self.admission.can_start(len(self.active), self.waiting, self.version) if self.waiting else 0
        new = [self.waiting.popleft() for _ in range(able)]
        if not new:
            return
        first = len(self.active)
        new, fed = self.admission.admit(first, new, self.version)
        self.fed += fed
        for slot, request in enumerate(new, start=first):
            if self.routing is not None and request.partial is not None:
                self.routing.resume(slot, request)
        if self.flight is not None:
            self.flight.admit(len(new))
        for slot, request in enumerate(new, start=first):
            if request.trace and isinstance(self.decoder, DraftVerify):
                self.tracer.follow(slot)
        self.active += new
        self.turns += [next(self._turns) for _ in new]

    def _context(self, slot: int) -> list[int]:
        """Return prompt and completion so far of a running request."""
        count = int(self.slots.count[slot])
        return [*self.active[slot].token_ids, *self.slots.tokens[slot, :count].tolist()]

    def _stop_strings(self, counts: Mapping[int, int]) -> list[int]:
        """Return the slots whose completion now holds one of its stop strings, cut after the token that completes it.

        ``counts``: tokens of the completion of each slot that took part in the cycle.
        """
        asked = [slot for slot in counts if self.active[slot].params.stop]
        if not asked:
            return []
        assert self.flight is None, "the next cycle goes on from tokens that may be cut"
        # One copy for all slots.
        hit, answers = [], self.slots.tokens[: len(self.active), : max(counts.values())].cpu()
        for slot in asked:
            request, ids = self.active[slot], answers[slot, : counts[slot]].tolist()
            if found := completed_at(self.policy.tokenizer, ids, request.params.stop):
                self.slots.cut(slot, found)
                hit.append(slot)
        return hit

    def _finish(self, ended: Mapping[int, FinishReason], park: bool = True) -> list[Finished]:
        """Return the completions of slots and free these slots: the last active rows move into their places.

        ``park``: whether to park caches for requests with ``park`` set.
        """
        if not ended:
            return []
        # The cycle in flight does not change the data of completions of ended rows, so that copies need not wait for
        # it. But it restores their columns only at its end.
        flight, stream = self.flight, None if self.keep_state else self.side
        with nullcontext() if flight is None else flight.beside(stream):
            finished = self._collect(dict(sorted(ended.items())))
        for slot, answer in zip(sorted(ended), finished, strict=True):
            request = self.active[slot]
            if park and request.park and self.decoder.extends:
                history = [*request.token_ids, *answer.completion.token_ids.tolist()]
                self.retention.park(slot, history, request.params.seed)
        left = len(self.active) - len(ended)
        sources = [slot for slot in range(left, len(self.active)) if slot not in ended]
        targets = sorted(slot for slot in ended if slot < left)
        if sources:
            self.slots.move(sources, targets, [self._most(slot) for slot in sources])
            self.tracer.move(sources, targets)
        for source, target in zip(sources, targets, strict=True):
            self.active[target], self.fed[target] = self.active[source], self.fed[source]
            self.turns[target] = self.turns[source]
        self.slots.release(left, len(self.active))
        self.retention.trim()
        del self.active[left:], self.fed[left:], self.turns[left:]
        if self.flight is not None:
            self.flight.move(sources, targets, left)
        return finished

    def _collect(self, ended: Mapping[int, FinishReason]) -> list[Finished]:
        """Return the completions of slots, copied off the device with one copy per table."""
        slots, chosen = self.slots, torch.tensor([*ended], device=self.slots.device)
        tables = (slots.tokens, slots.logprobs, slots.versions, slots.contexts, slots.stats)
        ids, logprobs, versions, contexts, stats = (table[chosen].cpu().numpy() for table in tables)
        counts, work, exact, begun = (
            table[chosen].tolist() for table in (slots.count, slots.work, slots.exact, slots.begun)
        )
        sampled = None if slots.sampled is None else slots.sampled[chosen].cpu().numpy()
        routing: Sequence[NDArray[np.int8 | np.int16] | None] = [None] * len(counts)
        if self.routing is not None:
            lengths = [len(self.active[slot].token_ids) + count for slot, count in zip(ended, counts, strict=True)]
            routing = self.routing.completions(chosen, [self.fed[slot] for slot in ended], lengths)
        finished = []
        for i, (slot, reason) in enumerate(ended.items()):
            request, count = self.active[slot], counts[i]
            cycles, target, draft, extra = work[i]
            fresh = count - (len(request.partial.token_ids) if request.partial else 0)
            sums = self.slots.named(stats[i].sum(0))
            done = {"target_forwards": target, "draft_forwards": draft, "extra_positions": extra}
            own = DecodeStats(cycles=cycles, tokens=fresh, **done, **sums)
            stretches = self._stretches(begun[i], stats[i])
            completion = Completion(
                token_ids=ids[i, :count].copy(),
                logprobs=logprobs[i, :count].copy(),
                versions=versions[i, :count].copy(),
                contexts=contexts[i, :count].copy(),
                text=self.text(ids[i, :count].tolist(), request.params, reason),
                finish_reason=reason,
                stats=request.partial.stats + own if request.partial else own,
                stretches=add_stretches(request.partial.stretches, stretches) if request.partial else stretches,
                exact=exact[i],
                sampled_logprobs=None if exact[i] or sampled is None else _known(sampled[i, :count]),
                state=self._state(slot) if reason == "abort" or self.keep_state else {},
                trace=self.tracer.end(slot, count, request.partial, slots.sizes.vocab),
                routing=routing[i],
            )
            finished.append(Finished(id=request.id, completion=completion))
        return finished

    def _state(self, slot: int) -> dict[str, NDArray[np.float64]]:
        """Return the state that the decoding system keeps of a running request."""
        return {name: row.to("cpu", copy=True).numpy() for name, row in self.slots.export(slot).items()}

    def _stretches(
        self, begun: Sequence[Sequence[int]], sums: NDArray[np.float64]
    ) -> tuple[tuple[int, DecodeStats], ...]:
        """Return the stretches in which a cycle began, with their statistics.

        ``begun`` [P + 1, 2] are cycles and tokens by stretch, ``sums`` [P + 1, n, K] the statistics.
        """
        stretches = []
        for start, (cycles, tokens), rows in zip((*self.starts, OPENING), begun, sums, strict=True):
            if cycles:
                stretches.append((start, DecodeStats(cycles=cycles, tokens=tokens, **self.slots.named(rows.copy()))))
        return tuple(sorted(stretches, key=lambda stretch: stretch[0]))


def _check_sizes(policy: Policy, slots: int, length: int, tokens: int | None, more: int) -> None:
    """Raise ``UserError`` unless the model, and a draft model, have positions for ``length`` tokens and enough memory.

    ``tokens`` and ``more`` are arguments of ``check_memory``.
    """
    config, draft = policy.backbone.config, policy.draft and policy.draft.backbone.config
    check_positions(config, length)
    if draft is not None:
        check_positions(draft, length, of="the draft model")
    check_memory(config, slots, length, policy.backbone.dtype, policy.device, tokens=tokens, more=more, draft=draft)


def _bytes_of_graphs(policy: Policy, decoding: DecodingConfig, slots: int) -> int:
    """Return an estimate of the bytes that CUDA graphs of an engine's cycles take."""
    drafts = decoding.limit if SYSTEMS[decoding.system].drafts else 0
    return bytes_of_graphs(slots, drafts, policy.vocab_size, policy.device)


def _known(logprobs: NDArray[np.float32]) -> NDArray[np.float32] | None:
    """Return a copy of the log-probs, or None if any is unknown."""
    return None if np.isnan(logprobs).any() else logprobs.copy()


@torch.inference_mode()
def time_cycles(decoder: DraftVerify, slots: Slots, clock: Callable[[], float]) -> None:
    """Time cycles by batch size and kind, before the first request, as the start of ``draft_tokens=auto``.

    The cycles run on made-up requests in free slots; a real request sets all of a slot anew. Drafts from history find
    as many tokens as they can use. Nothing is run for a draft length that does not depend on time.
    """
    length = decoder.length
    if not isinstance(length, TimedLength):
        return
    room = min(CONTEXT, slots.sizes.length // 2)
    asked, prompt = SamplingParams(max_new_tokens=slots.sizes.length - room), [0] * max(1, room)
    # On a GPU the first cycles of a kind compile kernels, and the second may be captured as a graph.
    warm = 2 if slots.device.type == "cuda" else 0
    for rows in length.sizes:
        for kind in length.kinds:
            length.forced, spent = kind, []
            for turn in range(warm + TURNS):
                slots.history.forget(prompt)
                slots.history.remember(prompt, [[0] * slots.sizes.drafts])
                slots.start(0, [asked] * rows, [prompt] * rows)
                longest = room
                for _ in range(length.before(kind)):
                    decoder.cycle(rows, longest, 0)
                    longest += 1 + slots.sizes.drafts
                began = clock()
                decoder.cycle(rows, longest, 0).tolist()
                spent += [clock() - began] * (turn >= warm)
            length.timed(spent)
    slots.history.forget(prompt)
    length.forget()


def generate(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Run requests to their end and return their completions in the same order."""
    requests = [dataclasses.replace(request, id=i) for i, request in enumerate(requests)]
    for request in requests:
        engine.add(request)
    done: dict[int, Completion] = {}
    while engine.unfinished:
        done |= {f.id: f.completion for f in engine.step()}
    return [done[i] for i in range(len(requests))]
