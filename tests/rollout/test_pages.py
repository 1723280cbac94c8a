"""Keys and values in pages: who has which page, that nobody notices, who waits, and how many fit.

The other tests of the engine run on pages as well, by ``--pages``.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.paged_cache import PagedContext
from bebop.rollout import prefill
from bebop.rollout.capacity import check_memory
from bebop.rollout.engine import Request
from bebop.rollout.pages import NOBODY, Pages, pages_of
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.trajectory import Completion
from tests.builders import alone, needs_more, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import finished, started

pytestmark = pytest.mark.slow  # the quick suite has a budget; conformance and exactness are in it

CPU = torch.device("cpu")
# ---- the table

SLOTS, ROOM, COUNT = 6, 60, 20  # of the pages that all slots at full length would take, four are not there


class Written:
    """Pages, a pool over them, and lists that say what each slot and each parked completion has to hold."""

    def __init__(self) -> None:
        self.pages = Pages(SLOTS, ROOM, COUNT, CPU)
        self.pool = self.pages.pool((1, 1, 1), torch.zeros(1, dtype=torch.float64), PagedContext)
        self.slots: list[list[int]] = [[] for _ in range(SLOTS)]
        self.parked: list[tuple[tuple[int, ...], list[int]]] = []
        self.next = 0

    def write(self, slot: int, count: int) -> None:
        """Append so many entries, each a number that was never written before."""
        own = self.slots[slot]
        self.pages.reserve(slot, len(own) + count)
        self.pages.upload()
        new = torch.arange(self.next, self.next + count, dtype=torch.float64)[None, None, :, None]
        entries = torch.arange(len(own), len(own) + count)[None]
        with self.pool.at(slot):
            self.pool.place(entries, 0)
            self.pool.write(0, new, -new)
        own += range(self.next, self.next + count)
        self.next += count

    def agrees(self) -> None:
        """Slots and parked completions hold what they have to, and the device's table is the host's."""
        self.pages.upload()
        keys, values = self.pool.held(0, SLOTS)
        assert torch.equal(keys, -values)
        for slot, own in enumerate(self.slots):
            assert keys[slot, 0, : len(own), 0].tolist() == own
        for held, own in self.parked:
            assert self.pool.keys[0][list(held)].flatten()[: len(own)].tolist() == own
        used = {page for pages in (*self.pages.held, *(held for held, _ in self.parked)) for page in pages}
        assert NOBODY not in used and self.pages.free == COUNT - len(used)
        alone = used - {page for pages in self.pages.held for page in pages}
        assert self.pages.parked == len(alone)


def act(world: Written, numbers: np.random.Generator) -> None:
    """Do one thing that an engine does, if there are pages for it."""
    pages, slots = world.pages, world.slots
    source, slot, other = (int(i) for i in numbers.integers(SLOTS, size=3))
    count, length = int(numbers.integers(1, 20)), int(numbers.integers(len(slots[source]) + 1))
    match int(numbers.integers(7)):
        case 0 | 1 if len(slots[slot]) + count <= ROOM and pages.missing(slot, len(slots[slot]) + count) <= pages.free:
            world.write(slot, count)
        case 2 if pages.free >= SLOTS:
            first, end = sorted((slot, other))
            pages.share(source, first, end + 1, length)
            own = slots[source]
            slots[first : end + 1] = [own if i == source else own[:length] for i in range(first, end + 1)]
            slots[:] = [list(own) for own in slots]
        case 3 if source != slot:
            pages.move(source, slot)
            slots[slot], slots[source] = slots[source], []
        case 4:
            world.parked.append((pages.hold(source, length), slots[source][:length]))
        case 5 if world.parked and pages.free:
            held, own = world.parked[int(numbers.integers(len(world.parked)))]
            length = int(numbers.integers(len(own) + 1))
            pages.restore(slot, held, length)
            slots[slot] = own[:length]
        case 6:
            pages.release(slot)
            slots[slot] = []
            if world.parked:
                pages.drop(world.parked.pop(0)[0])


def walk(seed: int) -> Written:
    """Do 400 things, and compare all entries after each."""
    world, numbers = Written(), np.random.default_rng(seed)
    for _ in range(400):
        act(world, numbers)
        world.agrees()
    return world


def test_everybody_holds_what_was_written_and_all_comes_back() -> None:
    world = walk(0)
    assert world.next > 500
    for slot in range(SLOTS):
        world.pages.release(slot)
    for held, _ in world.parked:
        world.pages.drop(held)
    assert world.pages.free == COUNT and not world.pages.parked
    world.pages.upload()
    assert not world.pages.table.any()


def test_a_last_page_that_is_not_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(self: Pages, own: Sequence[int], length: int, copies: list[tuple[int, int]]) -> list[int]:
        pages = list(own[: pages_of(length, self.size)])
        for page in pages:
            self._refer(page, 1, 0)
        return pages

    monkeypatch.setattr(Pages, "_shared", shared)
    with pytest.raises(AssertionError):
        walk(0)


def test_a_table_that_is_not_brought_to_the_device_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Pages.move

    def moved(self: Pages, source: int, target: int) -> None:
        own(self, source, target)
        self._changed.discard(target)

    monkeypatch.setattr(Pages, "move", moved)
    with pytest.raises(AssertionError):
        walk(0)


def test_a_page_that_is_given_back_twice_is_a_fault() -> None:
    pages = Pages(2, ROOM, COUNT, CPU)
    pages.reserve(0, 20)
    held = pages.hold(0, 20)
    pages.drop(held)
    with pytest.raises(AssertionError, match="given back twice"):
        pages.drop(held)


# ---- nobody notices

PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1] * 4, [9], [5, 1, 7] * 11, [5, 1, 7] * 11, [5, 1, 7] * 11, [2, 2]]
QUICK = ("autoregressive", "bebop", "bebop_tree", "block", "firp", "pipo", "bebop_history")


@cache
def policy(needs: bool) -> Policy:
    """A policy, with the parts of systems or without; nobody may change it."""
    return tiny_policy(seed=3, dtype=torch.float64, with_parts=needs)


def engine(system: str = "bebop", **settings: Any) -> TorchEngine:
    drafts = min(3, SYSTEMS[system].width) if SYSTEMS[system].drafts else 0
    config = DecodingConfig(
        system=system, draft_tokens=drafts, cost_ratio=0.04, verify_ratio=0.02, options=alone(system)
    )
    settings = {"slots": 5, "max_length": 96, "paged": True, **settings}
    return TorchEngine(policy(needs_more(system)), config, **settings)


def asked(count: int = 40, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Request]:
    return requests(prompts, max_new_tokens=count, seed=5, stop_token_ids=(11,))


def same(found: Mapping[int, Completion], wanted: Mapping[int, Completion]) -> None:
    """In tokens, log-probs and in how they were drafted."""
    assert found.keys() == wanted.keys()
    for i, b in wanted.items():
        a = found[i]
        assert (a.token_ids.tolist(), a.finish_reason, a.text) == (b.token_ids.tolist(), b.finish_reason, b.text)
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-6)
        assert (a.stats.cycles, a.stats.tokens) == (b.stats.cycles, b.stats.tokens)
        for name in ("reached", "accepted"):
            np.testing.assert_array_equal(getattr(a.stats, name), getattr(b.stats, name))
        parts, others = ([(at, s.cycles, s.tokens) for at, s in each.stretches] for each in (a, b))
        assert parts == others


def by_number(answers: Sequence[Completion]) -> dict[int, Completion]:
    return dict(enumerate(answers))


def driven(one: TorchEngine) -> dict[int, Completion]:
    """Decode groups that share prompts, in slots that are left and taken again; half are aborted once and go on."""
    started(one, asked())
    done = {f.id: f.completion for _ in range(3) for f in one.step()}
    for cut in one.abort([1, 4, 5]):
        one.add(dataclasses.replace(asked()[cut.id], partial=cut.completion))
    return done | finished(one)


@pytest.mark.parametrize("system", slow_but(QUICK, SYSTEMS))
def test_completions_are_those_of_slots(system: str) -> None:
    one = engine(system)
    same(driven(one), driven(engine(system, paged=False)))
    assert one.slots.pages is not None and one.slots.pages.free == one.slots.pages.count


@pytest.mark.parametrize("system", slow_but(["bebop"], SYSTEMS))
def test_rows_of_the_table_that_are_of_the_cycle_before_change_completions(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broken variant of the test above: the table that a cycle reads is as old as the cycle before."""
    wanted, own = driven(engine(system, paged=False)), Pages.upload

    def late(self: Pages) -> None:
        after, self._changed = self._changed, getattr(self, "before", set())
        own(self)
        self.before = after  # type: ignore[attr-defined]

    monkeypatch.setattr(Pages, "upload", late)
    found = driven(engine(system))
    assert any(found[i].token_ids.tolist() != wanted[i].token_ids.tolist() for i in wanted)


def test_a_group_shares_the_full_pages_of_its_prompt() -> None:
    one = started(engine(), asked(prompts=PROMPTS[4:7]), cycles=1)
    pages = one.slots.pages
    assert pages is not None
    first, *others = pages.held[:3]
    for own in others:
        assert own[:2] == first[:2] and not {*own[2:]} & {*first[2:]}, "32 entries lie in two full pages"
    assert pages.count - pages.free == 2 + sum(len(own) - 2 for own in (first, *others))


def test_a_request_moves_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    one = started(engine(), requests([[1, 2], [3, 4], [5, 6] * 12], max_new_tokens=60), cycles=2)
    pages = one.slots.pages
    assert pages is not None
    held = list(pages.held[2])
    monkeypatch.setattr(PagedContext, "copy_pages", lambda *given: pytest.fail("pages were copied"))
    one.abort([0])
    assert len(held) == 2 and pages.held[0] == held and not pages.held[2] and one.active[0].id == 2


# ---- who waits


def tight(system: str = "bebop", tokens: int = 96, **settings: Any) -> TorchEngine:
    return engine(system, cache_tokens=tokens, **{"slots": 8, **settings})


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let requests start that have hardly more pages than their context takes, so that they soon lack some."""
    monkeypatch.setattr(prefill, "STRETCH", 4)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("system", slow_but(["bebop", "pipo"], SYSTEMS))
def test_a_request_that_was_preempted_has_the_same_tokens(system: str) -> None:
    """In a pool for one request of full length, those that came last make room again and again."""
    plain = requests(PROMPTS[3:], max_new_tokens=60, seed=5)
    one = tight(system)
    found = by_number(generate(one, plain))
    wanted = by_number(generate(engine(system, slots=8), plain))
    assert one.preempted > 2
    assert {i: a.token_ids.tolist() for i, a in found.items()} == {i: a.token_ids.tolist() for i, a in wanted.items()}
    for i, answer in found.items():
        np.testing.assert_allclose(answer.logprobs, wanted[i].logprobs, rtol=0, atol=1e-6)
        assert (answer.stats.tokens, answer.finish_reason) == (60, "length")
    assert one.slots.pages is not None and one.slots.pages.free == one.slots.pages.count


@pytest.mark.usefixtures("hasty")
def test_the_request_that_came_last_is_preempted_and_comes_first_again(caplog: pytest.LogCaptureFixture) -> None:
    one, order = tight(), list[int]()
    started(one, requests([[i, i] for i in range(4)], max_new_tokens=80, seed=5))
    while one.unfinished:
        before, running = one.preempted, [*one.active]
        order += [f.id for f in one.step()]
        if one.preempted > before:
            latest = max(request.id for request in running)
            back = one.waiting[0] if one.waiting else one.active[-1]
            assert back.id <= latest and back.partial is not None
    assert one.preempted and sorted(order) == [*range(4)] and order[0] == 0
    assert caplog.messages[0].startswith("1 times a request had to wait again for want of pages")


def test_requests_start_in_their_order_once_pages_are_free() -> None:
    one = tight(tokens=96, slots=8)
    started(one, requests([[1, 2] * 20, [3, 4] * 20, [5]], max_new_tokens=40, seed=5), cycles=1)
    assert [r.id for r in one.active] == [0], "the second would need three pages and a stretch, the last one waits too"
    assert [r.id for r in one.waiting] == [1, 2]
    assert sorted(finished(one)) == [0, 1, 2]


@pytest.mark.usefixtures("hasty")
def test_abort_gives_back_what_a_preempted_request_had() -> None:
    one = tight()
    started(one, requests(PROMPTS, max_new_tokens=60, seed=5))
    while not one.preempted:
        one.step()
    waiting = next(r for r in one.waiting if r.partial is not None)
    cut = {f.id: f.completion for f in one.abort()}
    assert waiting.partial is not None and len(waiting.partial.token_ids) > 0
    np.testing.assert_array_equal(cut[waiting.id].token_ids, waiting.partial.token_ids)
    assert one.slots.pages is not None and one.slots.pages.free == one.slots.pages.count


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_weights_that_change_in_a_tight_pool(on_update: str) -> None:
    """Members of a group share no page any more once they are read anew, so that some have to wait."""
    other = tiny_policy(seed=4, dtype=torch.float64, with_parts=False)
    found = []
    for tokens in (128, 8 * 96):
        own = tiny_policy(seed=3, dtype=torch.float64, with_parts=False)
        one = TorchEngine(
            own, DecodingConfig(draft_tokens=3), slots=8, max_length=96, paged=True, on_update=on_update,
            cache_tokens=tokens,
        )  # fmt: skip
        started(one, requests([[5, 1, 7] * 11] * 6, max_new_tokens=30, seed=5), cycles=2)
        one.load_weights(other.weights(mtp=True), 1)
        done = finished(one)
        found.append((one.preempted, done))
        assert one.slots.pages is not None and one.slots.pages.free == one.slots.pages.count
    (tightly, mine), (roomy, wanted) = found
    assert tightly > roomy == 0
    for i, answer in wanted.items():
        start = int((answer.versions == 0).sum())
        assert mine[i].token_ids[:start].tolist() == answer.token_ids[:start].tolist()
        if on_update == "recompute":
            assert mine[i].token_ids.tolist() == answer.token_ids.tolist()
            np.testing.assert_allclose(mine[i].logprobs, answer.logprobs, rtol=0, atol=1e-6)


# ---- parked pages


def turn(one: TorchEngine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return the contexts after completions that are parked."""
    found = generate(one, [dataclasses.replace(r, park=True) for r in requests(prompts, max_new_tokens=20, seed=5)])
    return [[*prompt, *answer.token_ids.tolist()] for prompt, answer in zip(prompts, found, strict=True)]


@pytest.mark.usefixtures("hasty")
def test_parked_pages_count_where_no_slot_has_them_and_go_first() -> None:
    one = tight(tokens=160)
    pages = one.slots.pages
    assert pages is not None
    contexts = turn(one, [[5, 1, 7] * 11, [5, 1, 7] * 11])
    assert one.retention.counts.parked == 2 and pages.parked == 4 + 4 - 2, "two full pages are of both"
    assert one.retention.held_bytes == pages.parked * pages.bytes + sum(8 * len(c) for c in contexts)
    started(one, requests([[*contexts[0], 3]], max_new_tokens=10, seed=5), cycles=1)
    assert one.retention.counts.hits == 1 and pages.parked == 3, "of 52 entries three full pages are shared"
    finished(one)
    assert pages.parked == 6 and pages.free == pages.count - 6
    generate(one, requests([[2, 3] * 20], max_new_tokens=56, seed=5))
    assert one.retention.counts.evicted and one.preempted == 0


def test_the_bound_of_bytes_holds_for_pages() -> None:
    probe = tight(tokens=160)
    turn(probe, [[1, 2, 3]])
    one = tight(tokens=160, parked_bytes=int(2.5 * probe.retention.held_bytes))
    for i in range(4):
        turn(one, [[i, 2, 3]])
        assert one.retention.held_bytes <= one.retention.limit
    assert one.retention.counts.evicted == 2 and one.retention.counts.parked == 4
    small = tight(parked_bytes=10)
    turn(small, [[1, 2, 3]])
    assert small.retention.counts.refused == 1 and small.slots.pages is not None
    assert small.slots.pages.free == small.slots.pages.count
    one.retention.clear()
    assert one.slots.pages is not None and one.slots.pages.free == one.slots.pages.count


def test_turns_in_a_tight_pool_are_those_of_a_full_prefill() -> None:
    """What a request goes on from is the last to go, and may have to: it is read again then."""
    found = []
    for settings in ({"tokens": 96}, {"tokens": 8 * 96}, {"tokens": 8 * 96, "parked_bytes": 0}):
        one = tight(**settings)  # type: ignore[arg-type]
        contexts = [[1, 2, 3], [4, 4], [1, 2, 3]]
        for _ in range(3):
            contexts = [[*context, 3] for context in turn(one, contexts)]
        found.append((contexts, one.retention.counts.hits, one.retention.counts.evicted))
    assert found[0][0] == found[1][0] == found[2][0]
    assert 0 < found[0][1] <= found[1][1] and found[0][2] > found[1][2] == 0 == found[2][1]


# ---- how many fit


def in_flight(one: TorchEngine, lengths: Sequence[int]) -> float:
    """Return how many requests run on average, as long as some wait."""
    counts = []
    for i, length in enumerate(lengths):
        [request] = requests([[i % 11, 3, 1]], max_new_tokens=length, seed=i)
        one.add(dataclasses.replace(request, id=i))
    while one.waiting:
        one.step()
        counts.append(len(one.active))
    one.abort()
    return float(np.mean(counts))


def test_twice_as_many_requests_of_long_tailed_lengths_fit_the_same_bytes() -> None:
    """Lengths are lognormal, and the longest are cut at what a slot holds."""
    slots, longest = 4, 125
    lengths = np.random.default_rng(0).lognormal(np.log(15), 1.0, 70).clip(1, longest - 3).astype(int).tolist()
    sizes = {"max_length": longest}
    plain = engine("autoregressive", paged=False, slots=slots, **sizes)
    paged = engine("autoregressive", slots=8 * slots, cache_tokens=slots * plain.slots.capacity - 32, **sizes)
    stored: list[Tensor] = [one.slots.caches["target"].keys for one in (plain, paged)]
    assert stored[1].nbytes <= stored[0].nbytes
    found = [in_flight(one, lengths) for one in (plain, paged)]
    assert found[0] <= slots and found[1] >= 2 * slots


# ---- refusals


def test_pools_that_cannot_be_are_refused() -> None:
    for settings, line in (
        ({"cache_tokens": 95}, r"rollout\.torch\.cache_tokens=95 is not possible: give rollout\.max_length=96 or more"),
        ({"cache_tokens": 200, "paged": False}, r"cache_tokens=200 is not possible: the cache has no pages"),
    ):
        with pytest.raises(UserError, match=line):
            engine(**settings)
    config = policy(False).backbone.config
    huge = 10**12
    check_memory(config, huge, 100, torch.float32, CPU, tokens=1000)
    with pytest.raises(UserError, match=r"cache_tokens=1000000000000 is not possible: keys and values take \d+ GB"):
        check_memory(config, huge, 100, torch.float32, CPU, tokens=huge)
    with pytest.raises(UserError, match="exceeds max_length=96"):
        tight().add(requests([[1] * 60], max_new_tokens=60)[0])
