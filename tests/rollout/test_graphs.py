"""Cycles as CUDA graphs: their bodies read nothing and are the same operations every time; what is played is the same.

A CUDA graph is imitated by ``Tape``: it runs a body once, takes back all that was written, and keeps every operator
with the very tensors that it had. Playing it runs these operators again and knows nothing of Python: what a body took
from the host is as it was. So what does not survive a graph does not survive here.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.decoding import graphs
from bebop.rollout.decoding.base import Draft, Outcome, Plan, Rows
from bebop.rollout.decoding.graphs import Graphs, Recording, StagedDrafts
from bebop.rollout.decoding.timed_lengths import CostLength
from bebop.rollout.engine import Request
from bebop.rollout.slots import Slots, SlotSizes
from bebop.rollout.torch_builder import graphs_on
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion
from tests.builders import alone, needs_more, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import decoder_of, finished, started
from tests.rollout.test_launches import FREE, HostWait, NoCopies

pytestmark = pytest.mark.slow  # the quick suite has a budget; conformance and exactness are in it

STATIC = [name for name, system in SYSTEMS.items() if system.static]
HALF = [name for name, system in SYSTEMS.items() if system.static_verify]
# Operators that a device's numbers come to the host by, or that make a tensor as large as such a number says.
READS = {
    "item", "_local_scalar_dense", "nonzero", "nonzero_numpy", "argwhere", "is_nonzero", "equal", "_unique", "_unique2",
    "unique_dim", "unique_consecutive", "masked_select", "repeat_interleave", "bincount",
}  # fmt: skip
INDEXES = {"index", "index_put", "index_put_", "_index_put_impl_"}


class Watched(TorchDispatchMode):
    """Sees every operator that is not made of others; raises ``HostWait`` for one that a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[str, tuple[tuple[int, ...], ...]]] = []  # names, and shapes of what comes out

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run one operator; in inference mode even those arrive that are made of others."""
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        name = func._schema.name.removeprefix("aten::")
        masks = [x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)]
        if name in READS or (name in INDEXES and masks):
            raise HostWait(f"{name} of {[tuple(x.shape) for x in tree_leaves(args) if isinstance(x, Tensor)]}")
        return self.run(name, func, args, kwargs)

    def run(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run an operator that is allowed. Views are no work, and some are kept from cycle to cycle."""
        out = func(*args, **kwargs)
        if not func.is_view:
            self.shapes.append((name, tuple(tuple(x.shape) for x in tree_leaves(out) if isinstance(x, Tensor))))
        return out


class Tape(Watched):
    """A graph: operators with the tensors that they had, which stay."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, Sequence[Any], Mapping[str, Any], Any]] = []
        self._made: set[int] = set()  # storages that came with the recording
        self._before: dict[int, tuple[Any, Any]] = {}  # others that it wrote to, and what was there

    def run(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Keep an operator, and what it is about to overwrite."""
        known = {one.name: one for one in func._schema.arguments}
        given = [*zip(known.values(), args, strict=False), *((known[key], value) for key, value in kwargs.items())]
        for argument, value in given:
            if argument.alias_info is not None and argument.alias_info.is_write:
                storage = value.untyped_storage()
                if storage._cdata not in self._made | self._before.keys():
                    self._before[storage._cdata] = (storage, storage.clone())
        out = super().run(name, func, args, kwargs)
        if not func.is_view:
            # A parameter may come to have another storage; a graph keeps the address that it was given.
            kept = tree_map_only(torch.nn.Parameter, torch.Tensor.detach, (args, kwargs))
            self.operators.append((func, *kept, out))
            read = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
            made = {x.untyped_storage()._cdata for x in tree_leaves(out) if isinstance(x, Tensor)}
            self._made |= made - read - self._before.keys()
        return out

    def rewind(self) -> None:
        """Take back all that was written: a graph that is captured runs nothing."""
        for storage, content in self._before.values():
            storage.copy_(content)

    def play(self) -> None:
        """Run the operators once more."""
        for func, args, kwargs, out in self.operators:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


class TapeRecorder:
    """A ``Recorder`` of tapes."""

    def __init__(self) -> None:
        self.recorded, self.played, self.playing = 0, 0, False

    def record(self, body: Recording) -> Recording:
        """Record a body; nothing remains of its run."""
        with NoCopies(), Tape() as tape:
            outcome = body()
        tape.rewind()
        self.recorded += 1

        def play() -> Outcome:
            self.played, self.playing = self.played + 1, True
            tape.play()
            self.playing = False
            return outcome

        return play

    def held(self) -> int:
        """Return a MiB for each recording."""
        return self.recorded << 20

    def clear(self) -> None:
        """Do nothing."""


@contextmanager
def watched() -> Iterator[Watched]:
    """Within this block operators are seen, and copies between host and device are refused."""
    with NoCopies(), Watched() as one:
        yield one


# ---- bodies


@cache
def policy(needs: bool) -> Policy:
    """A policy, with the parts of systems or without; nobody may change it."""
    return tiny_policy(seed=3, dtype=torch.float64, with_parts=needs)


def engine(system: str, slots: int = 4, max_length: int = 64, **settings: Any) -> TorchEngine:
    config = DecodingConfig(system=system, draft_tokens=3, cost_ratio=0.2, verify_ratio=0.1)
    return TorchEngine(policy(needs_more(system)), config, slots=slots, max_length=max_length, **settings)


ASKED: dict[str, dict[str, Any]] = {
    "neutral": {},
    "of all kinds": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2},
    "by logits": {"temperature": 0.7},
}
TAKE_LOGITS = ("autoregressive", "target_only", "bebop", "bebop_adaptive")
ASKED_OF = [(system, asked) for system in STATIC for asked in ASKED if asked != "by logits" or system in TAKE_LOGITS]


@pytest.mark.parametrize(
    ("system", "asked"),
    slow_but(
        [*((system, "neutral") for system in STATIC), ("bebop_tree", "of all kinds"), ("bebop", "by logits")],
        ASKED_OF,
        several=True,
    ),
)
def test_a_body_reads_nothing_and_is_the_same_operations_in_every_cycle(system: str, asked: str, paged: bool) -> None:
    """Of four rows the last is dead: it emits nothing. Rows come to have other pages in between."""
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8]]
    one = started(engine(system), requests(prompts, max_new_tokens=40, **ASKED[asked]), cycles=2)
    one.slots.retire(3)
    emitted, seen = [one.slots.count.tolist()], []
    one.slots.release(3, 4)
    for _ in range(2):
        one.slots.reserve(0, [20] * 3, cycles=len(seen))
        seen.append(shapes(one, rows=4, logits=asked == "by logits"))
        emitted.append(one.slots.count.tolist())
    assert all(operators == seen[0] for operators in seen) and len(seen[0]) > 50
    steps = torch.tensor(emitted).diff(dim=0)
    assert (steps[:, :3] > 0).all() and (steps[:, 3] == 0).all()


@torch.inference_mode()
def shapes(one: TorchEngine, rows: int, logits: bool = False) -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Run a body; return its operators and the shapes of what comes out of them.

    Raises:
        HostWait: It reads the device.
    """
    with watched() as seen:
        decoder_of(one).body(Plan(rows=rows, longest=40, drafts=3, static=True, logits=logits))
    return seen.shapes


def test_what_is_planted_in_a_body_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads, shapes that depend on numbers, and what Python decides by a number of its own."""
    own, turns = Rows.verify_uniforms, iter(range(9))
    plants: dict[str, Callable[[Tensor], object]] = {
        "item": lambda x: x[0, 0].item(),
        "truth": lambda x: bool((x > 0).any()),
        "list": lambda x: x.tolist(),
        "nonzero": lambda x: x.nonzero(),
        "mask": lambda x: x[x > 0.5],
        "mask to write to": lambda x: x.clone().__setitem__(x > 0.5, 0.5),
        "of three": lambda x: torch.where(x > 0.5),
        "unique": lambda x: x.unique(),
    }
    for name, plant in plants.items():
        one = started(engine("bebop"), requests([[1, 2, 3]], max_new_tokens=40), cycles=1)
        monkeypatch.setattr(Rows, "verify_uniforms", lambda rows, n, p=plant: (p(own(rows, n)), own(rows, n))[1])
        with pytest.raises(HostWait):
            shapes(one, rows=2)
            pytest.fail(f"{name} was not seen")
    monkeypatch.setattr(Rows, "verify_uniforms", lambda rows, n: own(rows, n).abs() if next(turns) else own(rows, n))
    assert shapes(one, rows=2) != shapes(one, rows=2)


def test_a_system_that_is_not_static_is_seen() -> None:
    """Or its mark is missing."""
    for system in ("ngram", "blockpilot", "pad"):
        one = started(engine(system), requests([[1, 2, 1, 2]], max_new_tokens=20), cycles=1)
        with pytest.raises(HostWait):
            shapes(one, rows=1)
            pytest.fail(f"{system} reads nothing")


# ---- recorded cycles

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9], [2, 2], [5, 6], [5, 6], [3, 1, 4, 1, 5], [8]]


def mixed(asked: str) -> list[Request]:
    """Requests of 9 to 33 tokens, every other one with settings of its own, one with a stop string."""
    found = requests(PROMPTS, max_new_tokens=30, stop_token_ids=(11,), seed=5)
    for i, request in enumerate(found):
        own = ASKED[asked] if i % 2 else {}
        stop = {"stop": ("ab", "ca")} if i == 4 else {}
        params = replace(request.params, max_new_tokens=9 + 3 * i, **own, **stop)
        found[i] = replace(request, params=params)
    return found


def driven(one: TorchEngine, asked: Sequence[Request], other: Policy | None = None) -> dict[int, Completion]:
    """Decode requests that come in three portions, in batches that grow, shrink and close up; one is aborted.

    ``other``: whose weights come in flight.
    """
    done: dict[int, Completion] = {}
    for first, last in ((0, 1), (1, 8), (8, 9)):
        for request in asked[first:last]:
            one.add(request)
        for cycle in range(5):
            done |= {f.id: f.completion for f in one.step()}
            if other is not None and cycle == 2:
                one.load_weights(other.weights(mtp=True), version=last)
        if last == 8:
            done |= {f.id: f.completion for f in one.abort([3])}
    return done | finished(one)


def agree(found: Mapping[int, Completion], wanted: Mapping[int, Completion]) -> None:
    """Completions are the same; in fp64 log-probs differ by the rounding of other shapes."""
    assert found.keys() == wanted.keys()
    for i, b in wanted.items():
        a = found[i]
        assert (a.token_ids.tolist(), a.finish_reason, a.text) == (b.token_ids.tolist(), b.finish_reason, b.text)
        assert (a.versions.tolist(), a.contexts.tolist()) == (b.versions.tolist(), b.contexts.tolist())
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-6)
        for name in ("reached", "accepted", "overlap", "draft_entropy", "target_entropy"):
            np.testing.assert_allclose(getattr(a.stats, name), getattr(b.stats, name), rtol=0, atol=1e-6)
        assert (a.stats.cycles, a.stats.tokens) == (b.stats.cycles, b.stats.tokens)
        assert [(start, s.cycles, s.tokens) for start, s in a.stretches] == [
            (start, s.cycles, s.tokens) for start, s in b.stretches
        ]


@pytest.mark.parametrize(
    ("system", "asked"),
    slow_but(
        [("autoregressive", "neutral"), ("bebop", "neutral"), ("bebop", "by logits"), ("ngram", "neutral")],
        [*ASKED_OF, *((system, asked) for system in HALF for asked in ASKED if asked != "by logits")],
        several=True,
    ),
)
def test_recorded_cycles_give_what_cycles_give(
    system: str, asked: str, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights change in flight, contexts outgrow their bucket, and slots are left and taken again.

    Of some systems the verification alone is recorded: ``Tape`` refuses reads and shapes that depend on numbers.
    """
    monkeypatch.setattr(graphs, "SHORTEST", 16)
    needs, recorder, found = needs_more(system), TapeRecorder(), []
    for settings in ({}, {"recorder": recorder}):
        own = tiny_policy(seed=3, dtype=torch.float64, with_parts=needs)
        config = DecodingConfig(system=system, draft_tokens=3, cost_ratio=0.2, verify_ratio=0.1, options=alone(system))
        one = TorchEngine(own, config, slots=5, max_length=64, **settings)  # type: ignore[arg-type]
        decoder_of(one).logits = asked == "by logits"
        one.remember([1, 2, 3], [[5, 6, 7, 5, 6], [2, 2, 2, 9]])
        found.append(driven(one, mixed(asked), tiny_policy(seed=4, dtype=torch.float64, with_parts=False)))
    agree(found[1], found[0])
    assert recorder.played > recorder.recorded > 2


@pytest.mark.parametrize("overlap", [False, True])
def test_a_cycle_is_one_launch_and_few_operations_beside_it(overlap: bool) -> None:
    """A cycle in which nothing begins or ends, beside a row that has left; with overlap another one is read."""

    class Outside(Watched):
        def run(self, name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return func(*args, **kwargs) if recorder.playing else super().run(name, func, args, kwargs)

    recorder = TapeRecorder()
    short, *others = requests(PROMPTS[:4], max_new_tokens=50)
    short = replace(short, params=replace(short.params, max_new_tokens=2))
    one = started(engine("bebop", recorder=recorder, overlap=overlap), [short, *others], cycles=6)
    before = recorder.played
    assert (one.flight is not None) == overlap
    with Outside() as outside:
        one.step()
    assert recorder.played == before + 1
    beside = [name for name, _ in outside.shapes if name not in FREE]
    assert 0 < len(beside) <= 10, beside
    assert len(one.active) == 3 and one.slots.count[3] == one.slots.fed[3] == 0


def test_settings_are_those_of_the_requests_that_are_there() -> None:
    """One after another in one slot, in cycles of one size: neutral, tempered, greedy, penalised, and neutral again."""
    settings = ({}, {"temperature": 0.5}, {"temperature": 0.0}, {"repetition_penalty": 3.0}, {"top_k": 2}, {})
    found = []
    for more in ({}, {"recorder": TapeRecorder()}):
        one = engine("autoregressive", slots=1, **more)
        asked = [requests([[1, 2, 3]], max_new_tokens=9, seed=i, **own)[0] for i, own in enumerate(settings)]
        found.append(finished(started(one, [replace(request, id=i) for i, request in enumerate(asked)])))
    agree(found[1], found[0])


def test_what_is_cut_off_is_of_the_cycle_that_was_played() -> None:
    """Of two rows, though cycles of one row were recorded later."""
    found = []
    for more in ({}, {"recorder": TapeRecorder()}):
        first, second, third = requests(PROMPTS[1:4], max_new_tokens=40)
        second = replace(second, params=replace(second.params, max_new_tokens=9))
        one = started(engine("bebop", slots=2, **more), [first, second])
        while len(one.active) != 1:
            one.step()
        for request in (None, None, None, third, None, None):
            if request is not None:
                one.add(request)
            one.step()
        slots = one.slots
        while one.slots.latest is None or int(one.slots.latest[2][1]) < 2:
            one.step()
        slots.cut(1, int(slots.count[1]) - 1)
        found.append((slots.stats.clone(), slots.begun.clone(), slots.count.clone()))
    assert all(torch.allclose(a, b) for a, b in zip(*found, strict=True))


def test_systems_come_and_go_between_recorded_cycles() -> None:
    recorder, found = TapeRecorder(), []
    for settings in ({}, {"recorder": recorder}):
        one = started(engine("bebop", room=4, **settings), requests(PROMPTS[:2], max_new_tokens=42), cycles=3)
        for system, drafts in (("autoregressive", 1), ("bebop_tree", 4), ("target_only", 2), ("bebop", 2)):
            one.configure(DecodingConfig(system=system, draft_tokens=drafts))
            for _ in range(3):
                one.step()
        found.append(finished(one))
    agree(found[1], found[0])
    assert recorder.recorded >= 5


def test_weights_that_lie_elsewhere_end_what_was_recorded() -> None:
    found = []
    for more in ({}, {"recorder": TapeRecorder()}):
        own = tiny_policy(seed=3, dtype=torch.float64, with_parts=False)
        config = DecodingConfig(system="autoregressive")
        one = TorchEngine(own, config, slots=1, max_length=64, **more)  # type: ignore[arg-type]
        started(one, requests(PROMPTS[:1], max_new_tokens=12), cycles=4)
        table = own.backbone.get_input_embeddings().weight
        table.data = table.data.flip(0)
        found.append(finished(one))
    agree(found[1], found[0])


def test_the_log_says_what_graphs_hold(caplog: pytest.LogCaptureFixture) -> None:
    recorder = TapeRecorder()
    one = started(engine("autoregressive", recorder=recorder), requests(PROMPTS[:1], max_new_tokens=9), cycles=4)
    [line] = caplog.messages
    assert line == (
        "CUDA graph 1: a cycle of 1 rows, 0 drafts and up to 256 entries takes 1.0 MiB; 1 graphs hold 1.0 MiB"
    )
    assert one.active


REFUSED: dict[str, tuple[str, dict[str, Any], bool]] = {
    "decoding.system=pad reads the device": ("pad", {}, False),
    "decoding.system=firp reads the device": ("firp", {}, False),
    "decoding.system=pipo has a cycle of its own": ("pipo", {}, False),
    "requests are traced": ("bebop", {}, True),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_recorded_is_said_once_and_runs_all_the_same(
    reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    system, settings, trace = REFUSED[reason]
    recorder, found = TapeRecorder(), []
    config = DecodingConfig(system=system, draft_tokens=SYSTEMS[system].draft_tokens, **settings)
    own = policy(needs_more(system))
    for more in ({}, {"recorder": recorder}):
        one = TorchEngine(own, config, slots=2, max_length=64, **more)  # type: ignore[arg-type]
        found.append(finished(started(one, [replace(r, trace=trace) for r in requests(PROMPTS[:2], max_new_tokens=9)])))
    agree(found[1], found[0])
    assert [(a.trace is None) for a in found[1].values()] == [not trace] * 2
    assert recorder.recorded == 0
    assert [reason in message for message in caplog.messages] == [True]


@pytest.mark.parametrize(
    ("system", "changes"),
    [("bebop", {"draft_temperature": "auto"}), ("history", {"draft_tokens": "auto"}), ("bebop_history", {})],
)
def test_verification_alone_is_recorded_where_drafting_or_learning_reads(
    system: str, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Temperatures and draft lengths that learn, drafts that history knows or not: widths from nothing to the most."""
    recorder, found = TapeRecorder(), []
    config = DecodingConfig(**{"system": system, "draft_tokens": 4, "options": alone(system), **changes})
    for more in ({}, {"recorder": recorder}):
        clock = iter(range(10**6))
        one = TorchEngine(policy(False), config, slots=3, max_length=64, clock=lambda c=clock: float(next(c)), **more)  # type: ignore[arg-type]
        one.remember([1, 2, 3], [[5, 6, 7, 5, 6], [2, 2, 2, 9]])
        found.append(finished(started(one, requests(PROMPTS[:5], max_new_tokens=20, stop_token_ids=(11,)))))
    if changes != {"draft_tokens": "auto"}:  # which drafts by the time of cycles, and those that are new teach nothing
        agree(found[1], found[0])
    assert recorder.played > 0 and not [line for line in caplog.messages if "without CUDA graphs" in line]


def test_drafts_are_put_into_tensors_that_stay() -> None:
    """Rounded up to a power of two; what is beyond a row's own drafts does not count, and a dead row has none."""
    sizes = SlotSizes(slots=8, length=8, drafts=5, vocab=6)
    staged = StagedDrafts(Slots(sizes, torch.device("cpu")))
    kept: dict[str, int] = {}
    for drafts, width in ((3, 4), (1, 1), (5, 5), (0, 0), (3, 4)):
        draft = Draft(
            tokens=torch.randint(6, (3, drafts)), probs=torch.rand(3, drafts, 6), head=torch.rand(3, 6),
            sources={"history": torch.rand(3, drafts)}, total=7, forwards=2,
            lengths=None if drafts == 5 else torch.arange(3).clamp_max(drafts),
        )  # fmt: skip
        uniforms = torch.rand(3, 12)
        plan, held, numbers = staged.put(Plan(rows=4, longest=9, drafts=5), draft, uniforms)
        assert plan.drafts == width and plan.drafted is not None and ".head" in plan.drafted
        assert held.probs is not None and held.head is not None and held.lengths is not None
        assert held.tokens.shape == (4, width) and held.probs.shape == (4, width, 6) and held.total is None
        for mine, own in ((held.tokens, draft.tokens), (held.probs, draft.probs)):
            assert own is not None and torch.equal(mine[:3, :drafts], own)
        assert torch.equal(held.sources["history"][:3, :drafts], draft.sources["history"])
        assert torch.equal(held.head[:3], draft.head) and torch.equal(numbers[:3], uniforms)  # type: ignore[arg-type]
        assert held.lengths.tolist() == [*([5] * 3 if drafts == 5 else [min(i, drafts) for i in range(3)]), 0]
        if drafts == 3:
            assert kept.setdefault("probs", held.probs.data_ptr()) == held.probs.data_ptr()
    assert staged.layout == 0


def test_a_traced_request_leaves_recorded_cycles_to_those_after_it() -> None:
    recorder = TapeRecorder()
    traced, *others = requests(PROMPTS[:3], max_new_tokens=40)
    short = replace(traced, trace=True, params=replace(traced.params, max_new_tokens=4))
    one = started(engine("bebop", recorder=recorder), [short, *others])
    while any(request.trace for request in [*one.waiting, *one.active]):
        one.step()
    assert recorder.played == 0
    finished(one)
    assert recorder.played > 0


def test_draft_lengths_learn_from_played_cycles_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cycle that is recorded, or the first of its plan, takes longer than those after it."""
    learned: list[float] = []
    own, recorder, clock = CostLength.took, TapeRecorder(), iter(range(10_000))
    monkeypatch.setattr(CostLength, "took", lambda self, s: (learned.append(self._kept is not None), own(self, s))[1])
    config = DecodingConfig(system="bebop", draft_tokens="auto", most_drafts=2)
    one = TorchEngine(
        policy(False), config, slots=2, max_length=64, recorder=recorder, clock=lambda: float(next(clock))
    )
    recorded, played = recorder.recorded, recorder.played
    assert recorded == 2 * 3, "two sizes, and 0 to 2 drafts: timed before the first request"
    finished(started(one, requests(PROMPTS[:2], max_new_tokens=20)))
    assert sum(learned) == recorder.played - played - (recorder.recorded - recorded) > 0


def test_buckets_hold_what_they_are_for_and_few_are_there() -> None:
    for slots in (1, 3, 32, 100, 256):
        buckets = Graphs(TapeRecorder(), slots)
        rows = [buckets.rows(batch) for batch in range(1, slots + 1)]
        assert all(batch <= found <= slots for batch, found in enumerate(rows, start=1)) and len({*rows}) <= 13
        assert all(found < 2 * batch for batch, found in enumerate(rows, start=1))
    entries = [buckets.entries(longest) for longest in range(1, 4097)]
    assert all(longest <= found for longest, found in enumerate(entries, start=1)) and len({*entries}) == 5


def test_one_bucket_serves_all_cycles_where_rounding_may_not_depend_on_others() -> None:
    only = Graphs(TapeRecorder(), 8, only_entries=96)
    assert {(only.rows(batch), only.entries(longest)) for batch in range(1, 9) for longest in (1, 96)} == {(8, 96)}
    assert from_dict(JobConfig, {"rollout": {"torch": {"batch_invariant": True}}}).decoding.static
    for auto in ("draft_tokens", "draft_temperature"):
        with pytest.raises(UserError, match="batch_invariant=True is not possible: shapes of these cycles depend"):
            from_dict(JobConfig, {"rollout": {"torch": {"batch_invariant": True}}, "decoding": {auto: "auto"}})


def test_a_job_takes_graphs_where_they_are_asked_for() -> None:
    assert not graphs_on(JobConfig(), torch.device("cuda"))
    assert graphs_on(from_dict(JobConfig, {"rollout": {"torch": {"cuda_graphs": True}}}), torch.device("cuda"))


def test_graphs_that_are_asked_for_on_a_cpu_are_refused() -> None:
    config = from_dict(JobConfig, {"rollout": {"torch": {"cuda_graphs": True}}})
    with pytest.raises(UserError, match=r"cuda_graphs=True is not possible on model\.device=cpu: give"):
        graphs_on(config, torch.device("cpu"))


def test_no_more_graphs_are_held_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MOST", 2)
    monkeypatch.setattr(graphs, "SHORTEST", 16)
    recorder, found = TapeRecorder(), []
    for settings in ({}, {"recorder": recorder}):
        one = engine("autoregressive", **settings)
        found.append(driven(one, mixed("neutral")))
    kept = decoder_of(one).graphs
    assert kept is not None and len(kept._recordings) == 2 < recorder.recorded
    agree(found[1], found[0])
