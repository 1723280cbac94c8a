"""Every decoding system emits the distribution that it has to, and the same test rejects broken variants of it.

An engine answers two prompts some thousand times. Chi-square holds the first three tokens against their joint
distribution: the target's, enumerated; for pad and pipo one worked out from passes over whole texts (``LAWS``).

- ``FEW`` draws, in ``make test``: one system for each acceptance rule, and a broken variant of each that they catch.
- ``MANY`` draws, slow: every system of the registry, other settings and temperatures, and every broken variant.
- Seeds are fixed. A p-value is corrected for the number of tests. ``test_conformance.py`` covers temperature 0.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.llm import LLM
from bebop.model.attention import PackedContext, SlotContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.timed_lengths import CostLength
from bebop.rollout.history import Automaton, History
from bebop.rollout.pages import Pages
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.systems.history.decoding import HistoryMTPDrafter
from bebop.systems.history.matching import BUCKETS, Trusted
from bebop.systems.pad.network import PivotNetwork
from bebop.systems.pipo.decoding import PairDecoder
from bebop.systems.pipo.options import PipoOptions
from bebop.trajectory import Completion, SamplingParams
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.goodness_of_fit import p_value
from tests.rollout.broken import (
    EAGLE3,
    BonusFromTheLastDraftRow,
    DraftsFromTheTokenBefore,
    DrawnAgain,
    DropUnlikely,
    EndsAtOverrides,
    FeedsRejectedDrafts,
    Flatter,
    HeadReported,
    KeepsLikelyDrafts,
    LastThatPasses,
    OneUniformForBoth,
    OnlyWhatWillStand,
    OtherTemperature,
    OverridesStops,
    Peeking,
    PeekingTemperature,
    ResidualIsTheTarget,
    RowOfTheParent,
    StaleRow,
    StaleTable,
    TakesTheNextDraft,
    UnprocessedDraft,
    WrongParent,
    WrongState,
)
from tests.rollout.driving import decoder_of, finished, started
from tests.rollout.pad_distribution import P_MIN, STOP, TAU, PadDistribution, random_network
from tests.rollout.slow_pairs import pair_distribution
from tests.rollout.trees import FIRP_TREES, FIVE, head_tree, likely_firp_tree

VOCAB, TOKENS = 5, 3
FEW, MANY = 2_000, 5_000  # draws for each prompt; FEW answer the first prompt alone
PROMPTS = ((0, 1, 2), (3, 3, 1, 0))  # after the second most drafts are rejected
REJECTING = PROMPTS[::-1]
UNPADDED = ((1, 2, 3), (3, 3, 1, 2))  # of odd and even length, without the pad token 0 of pairs
LEVEL = 1e-3
CAUGHT = LEVEL / 100

# ---- what is drawn from


def tiny() -> Policy:
    return tiny_policy(VOCAB, seed=11, sharp=16.0)


def zeroed_firp() -> Policy:
    """The same with matrices of zeros."""
    policy = tiny()
    for matrix in policy.parts["firp"].parameters():
        matrix.zero_()
    return policy


def pivot(position: str) -> Callable[[], Policy]:
    """The same with a random classifier that reads the state at this position."""

    def made() -> Policy:
        policy = tiny()
        policy.parts["pivot"] = random_network(position, policy)
        return policy

    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A decoding system under settings whose output distribution is known."""

    decoding: DecodingConfig
    temperature: float = 1.0
    prompts: tuple[tuple[int, ...], ...] = PROMPTS
    model: Callable[[], Policy] = tiny
    past: Literal["", "overlapping", "misleading"] = ""  # past completions that history is told of
    mixed: bool = False  # every draft is of the mean of history and head, whatever was learned
    stop: int = -1  # a token that ends completions; -1: none
    paged: bool | None = None  # whether keys and values lie in pages; None: as by default
    accepted: tuple[float, float] = (0.1, 1.0)  # the share of accepted drafts lies between, or nothing is tested


def of_system(system: str, temperature: float = 1.0, drafts: int | str = 2, **settings: Any) -> Case:
    """Return a case of a system by its name; a tree has four nodes, as two would have no siblings."""
    if drafts == 2:
        drafts = 4 if SYSTEMS[system].tree else min(2, SYSTEMS[system].width)
    decoding = DecodingConfig(system=system, draft_tokens=drafts, most_drafts=2, **settings)  # type: ignore[arg-type]
    return Case(decoding=decoding, temperature=temperature)


def of_history(system: str, past: Any, siblings: bool = False, auto: bool = False, **settings: Any) -> Case:
    """Return a case of a system with history, which costs nothing, so that it drafts whenever it can."""
    decoding = DecodingConfig(
        system=system,
        draft_tokens="auto" if auto else 3,
        most_drafts=3,
        verify_ratio=0.0,
        cost_ratio=0.0,
        options={"siblings": siblings},
    )
    return Case(decoding=decoding, past=past, accepted=(0.1 if past == "overlapping" else 0.0, 1.0), **settings)


def of_pad(position: str, temperature: float) -> Case:
    decoding = DecodingConfig(system="pad", draft_tokens=2, options={"tau": TAU, "p_min": P_MIN})
    return Case(decoding=decoding, temperature=temperature, model=pivot(position), prompts=REJECTING, stop=STOP)


def of_pipo(model: Callable[[], Policy] = tiny, **options: Any) -> Case:
    """Return a case of pipo; 0.9: a gate that is almost always open tests no more than one that is shut."""
    decoding = DecodingConfig(system="pipo", draft_tokens=1, options=options)
    return Case(decoding=decoding, temperature=0.8, model=model, prompts=UNPADDED, accepted=(0.1, 0.9))


# ---- the distributions that are expected


def exact_distribution(policy: Policy, prompt: Sequence[int], temperature: float) -> np.ndarray:
    """Return the target's joint distribution [V, V, V] of the next three tokens, by enumeration."""
    pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    ids = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], 1)
    lengths = torch.full((len(ids),), ids.shape[1])
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    with torch.no_grad():
        hidden = policy.hidden(ids.reshape(1, -1), positions[None], PackedContext(lengths))
        logits = policy.logits(hidden).view(*ids.shape, VOCAB)[:, len(prompt) - 1 :]
    p = (logits.double() / temperature).softmax(-1).view(VOCAB, VOCAB, 3, VOCAB)
    first, second, third = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def target_law(case: Case, policy: Policy, prompt: Sequence[int]) -> np.ndarray:
    return exact_distribution(policy, prompt, case.temperature)


def pad_law(case: Case, policy: Policy, prompt: Sequence[int]) -> np.ndarray:
    network = policy.parts["pivot"]
    assert isinstance(network, PivotNetwork)
    return PadDistribution(policy, network, case.temperature, case.stop).joint(prompt).numpy()


def never_overrides(case: Case, policy: Policy, prompt: Sequence[int]) -> np.ndarray:
    network = policy.parts["pivot"]
    assert isinstance(network, PivotNetwork)
    return PadDistribution(policy, network, case.temperature, case.stop).without_overrides().joint(prompt).numpy()


def pair_law(case: Case, policy: Policy, prompt: Sequence[int]) -> np.ndarray:
    return pair_distribution(policy, prompt, case.decoding.of(PipoOptions), case.temperature)


def always_shut(case: Case, policy: Policy, prompt: Sequence[int]) -> np.ndarray:
    return pair_distribution(policy, prompt, PipoOptions(tau=2.0), case.temperature)


def always_open(case: Case, policy: Policy, prompt: Sequence[int]) -> np.ndarray:
    return pair_distribution(policy, prompt, PipoOptions(tau=-1.0), case.temperature)


Law = Callable[[Case, Policy, Sequence[int]], np.ndarray]
LAWS: Mapping[str, Law] = {"pad": pad_law, "pipo": pair_law}  # of inexact systems; all others have the target's
NOT_THEIRS: Mapping[str, tuple[Law, ...]] = {"pad": (never_overrides,), "pipo": (target_law, always_shut, always_open)}

# ---- draws, and how well they fit

Fault = Callable[[TorchEngine], None]


def answers(case: Case, policy: Policy, draws: int, fault: Fault | None = None) -> list[Completion]:
    """Return so many completions to one prompt after another, from one engine."""
    numbers = np.random.default_rng(0)
    seconds = numbers.lognormal(-3.0, 2.0, size=100_000).cumsum().tolist()  # by which as many drafts as pay are made
    slots = 100 if case.decoding.draft_tokens == "auto" else 1000  # with auto, cycles of all sizes are timed first
    clock = iter(seconds).__next__
    engine = TorchEngine(policy, case.decoding, slots=slots, max_length=16, clock=clock, paged=case.paged)
    length = getattr(engine.decoder, "length", None)
    if isinstance(length, CostLength):  # in some cycles the number that pays, in others any
        pace, paying = length.pace, length.pace.choose
        pace.choose = lambda rows: (paying(rows) + int(numbers.integers(3))) % 3  # type: ignore[method-assign]
    if case.past:
        for prompt in case.prompts:
            engine.remember(prompt, past_answers(target_law(case, policy, prompt), case.past))
    if case.mixed:
        drafter = decoder_of(engine).drafter
        assert isinstance(drafter, HistoryMTPDrafter)
        mean = Trusted(share=[0.5] * BUCKETS, alone=[0.5] * BUCKETS, gain=[1.0] * BUCKETS)
        drafter.matching.trusted = lambda rows: [mean] * rows.batch  # type: ignore[method-assign]
    if fault is not None:
        fault(engine)
    more = 0 if draws == FEW else 2  # what follows changes nothing; where time is no matter, no cycle is cut off
    stops = (case.stop,) if case.stop >= 0 else ()
    asked = requests(
        [prompt for prompt in prompts_of(case, draws) for _ in range(draws)],
        temperature=case.temperature,
        max_new_tokens=TOKENS + more,
        stop_token_ids=stops,
    )
    return generate(engine, asked)


def prompts_of(case: Case, draws: int) -> Sequence[tuple[int, ...]]:
    return case.prompts[:1] if draws == FEW else case.prompts


def past_answers(expected: np.ndarray, past: str) -> list[tuple[int, ...]]:
    """Return twelve completions that the target gives, or two each of its six least likely ones."""
    if past == "overlapping":
        chosen = np.random.default_rng(0).choice(expected.size, 12, p=expected.ravel() / expected.sum())
    else:
        chosen = np.repeat(expected.ravel().argsort()[:6], 2)
    return [tuple(int(i) for i in np.unravel_index(place, expected.shape)) for place in chosen]


def assert_tested(case: Case, done: list[Completion]) -> None:
    """Drafts were made, accepted and rejected, from where the case says: otherwise no fault could show."""
    system = SYSTEMS[case.decoding.system]
    if not system.drafts:
        return
    reached, accepted = (sum(float(getattr(a.stats, name).sum()) for a in done) for name in ("reached", "accepted"))
    least, most = case.accepted
    assert reached > 0.2 * len(done) and least * reached < accepted <= most * reached, "nothing is tested"
    if case.past:  # what misleads is left out of a mixture soon
        history = sum(float(a.stats.counts["history"].sum()) for a in done)
        assert history >= (0.05 if case.past == "overlapping" or not system.head else 0.0) * reached
    if case.decoding.system == "pad":
        assert sum(float(a.stats.counts["overridden"].sum()) for a in done) > 0.02 * reached
    assert all(a.exact == system.exact for a in done)


def counted(done: Sequence[Completion], stop: int) -> np.ndarray:
    """Return counts [V, V, V] of the first three tokens; a completion that stopped goes on with its stop token."""
    table = np.zeros((VOCAB,) * TOKENS)
    for tokens, count in Counter(tuple([*a.token_ids.tolist(), *[stop] * TOKENS][:TOKENS]) for a in done).items():
        table[tokens] = count
    return table


def smallest_p(case: Case, policy: Policy, done: list[Completion], law: Law) -> float:
    """Return the smallest p-value over prompts, single tokens and the joint distribution, corrected for their number
    (Bonferroni)."""
    values = []
    draws = FEW if len(done) == FEW else MANY
    for number, prompt in enumerate(prompts_of(case, draws)):
        expected = law(case, policy, prompt)
        counts = counted(done[number * draws : (number + 1) * draws], case.stop)
        values.append(p_value(counts, expected))
        for axis in range(TOKENS):
            others = tuple(a for a in range(TOKENS) if a != axis)
            values.append(p_value(counts.sum(others), expected.sum(others)))
    return min(values) * len(values)


def check(case: Case, draws: int) -> None:
    """Assert that a case has its distribution, and none of those that it must not have."""
    policy, system = case.model(), case.decoding.system
    done = answers(case, policy, draws)
    assert_tested(case, done)
    assert smallest_p(case, policy, done, LAWS.get(system, target_law)) > LEVEL
    for law in NOT_THEIRS.get(system, ()):
        assert smallest_p(case, policy, done, law) < CAUGHT, law.__name__


def few_and_many(quick: Collection[str], names: Collection[str], slow: Collection[str] = ()) -> list[Any]:
    """Return (name, draws): the quick and the slow ones with few draws, all with many, which is exhaustive."""
    many = pytest.mark.exhaustive("many draws of every case: minutes of both cores")
    few = slow_but(
        [(name, FEW) for name in quick], [(name, FEW) for name in {**dict.fromkeys(quick), **dict.fromkeys(slow)}], True
    )
    return [*few, *(pytest.param(name, MANY, marks=many) for name in names)]


# ---- the systems

EXACT = {
    f"{name}-{temperature}": of_system(name, temperature)
    for name, system in SYSTEMS.items()
    for temperature in (1.0, 0.7)
    if system.exact
}
BLOCK_SIZES = {
    f"{name}-{size}": of_system(name, drafts=size - 1)
    for name in ("block", "block_target_only")
    for size in (2, 5, 9, 17)  # 3 is the size in EXACT
}
TREES = {
    **{f"bebop_tree-five-{t}": Case(decoding=head_tree(FIVE), temperature=t) for t in (0.7, 1.0, 1.3)},
    **{
        f"bebop_tree-five-greedy-{t}": Case(decoding=head_tree(FIVE, draft_temperature=0.0), temperature=t)
        for t in (0.7, 1.0, 1.3)
    },
    **{
        f"firp-{name}-{t}": Case(decoding=FIRP_TREES[name], temperature=t)
        for name, temperatures in {
            "five": (0.7, 1.0, 1.3),
            "sixteen": (0.7, 1.0, 1.3),
            "likeliest": (1.0,),
            "two-paths": (0.7,),
            "greedy": (1.3,),
        }.items()
        for t in temperatures
    },
    "firp-sixty-three-1.0": Case(decoding=likely_firp_tree(63)),
    "firp-zeroed-0.7": Case(decoding=FIRP_TREES["five"], temperature=0.7, model=zeroed_firp),
}
HISTORY = {
    f"{name}-{past}": case
    for past in ("overlapping", "misleading")
    for name, case in {
        "history": of_history("history", past),
        "bebop_history": of_history("bebop_history", past),
        "bebop_history-siblings": of_history("bebop_history", past, siblings=True, temperature=0.7),
    }.items()
}
TARGETS = EXACT | BLOCK_SIZES | TREES | HISTORY
RULES = ["target_only-0.7", "bebop-0.7", "bebop_block-0.7", "bebop_tree-0.7"]  # one for each way to accept a draft


@pytest.mark.parametrize(
    ("name", "draws"), few_and_many(RULES, TARGETS, [f"{name}-0.7" for name, system in SYSTEMS.items() if system.exact])
)
def test_the_output_distribution_is_the_target(name: str, draws: int) -> None:
    check(TARGETS[name], draws)


CHOSEN_TEMPERATURES = {
    name: of_system(name, 0.7, draft_temperature="auto")
    for name, system in SYSTEMS.items()
    if system.exact and system.supports_auto_temperature
}


@pytest.mark.parametrize(("name", "draws"), few_and_many(["bebop"], CHOSEN_TEMPERATURES))
def test_the_output_distribution_is_the_target_at_draft_temperatures_that_are_chosen(name: str, draws: int) -> None:
    check(CHOSEN_TEMPERATURES[name], draws)


AS_MANY_AS_PAY = {
    **{name: of_system(name, drafts="auto") for name, system in SYSTEMS.items() if system.exact and system.free_length},
    **{name: of_history(name, "overlapping", auto=True) for name in ("history", "bebop_history")},
}


@pytest.mark.parametrize(("name", "draws"), few_and_many([], AS_MANY_AS_PAY))
def test_the_output_distribution_is_the_target_with_as_many_drafts_as_pay(name: str, draws: int) -> None:
    """The number changes from cycle to cycle, in some of them to a chosen one and in others to any, 0 among them."""
    check(AS_MANY_AS_PAY[name], draws)


MIXTURES = {past: of_history("bebop_history", past, mixed=True) for past in ("overlapping", "misleading")}


@pytest.mark.parametrize(("name", "draws"), few_and_many(["overlapping"], MIXTURES))
def test_the_output_distribution_of_mixtures_is_the_target(name: str, draws: int) -> None:
    check(MIXTURES[name], draws)


PAD = {f"{position}-{t}": of_pad(position, t) for position in ("pred", "cand") for t in (1.0, 0.7)}


@pytest.mark.parametrize(("name", "draws"), few_and_many(["pred-0.7"], PAD))
def test_the_output_distribution_is_the_one_worked_out(name: str, draws: int) -> None:
    check(PAD[name], draws)


PIPO = {
    "confidence": of_pipo(tau=0.5),
    "random": of_pipo(gate="random", keep=0.6),
}


@pytest.mark.parametrize(("name", "draws"), few_and_many(["confidence"], PIPO))
def test_three_tokens_have_the_pair_networks_distribution(name: str, draws: int) -> None:
    check(PIPO[name], draws)


IN_PAGES = {
    **{name: replace(case, paged=True) for name, case in EXACT.items() if name.endswith("-0.7")},
    **{name: replace(case, paged=True) for name, case in HISTORY.items() if name.endswith("overlapping")},
    "pad": replace(PAD["pred-0.7"], paged=True),
    "pipo": replace(PIPO["confidence"], paged=True),
}


@pytest.mark.parametrize(("name", "draws"), few_and_many([], IN_PAGES, IN_PAGES))
def test_distributions_are_the_same_with_keys_and_values_in_pages(name: str, draws: int) -> None:
    check(IN_PAGES[name], draws)


SAME_SEEDS = {  # name -> system, whether completions in progress count, cycles of bebop before it takes over
    "history": ("history", False, 0),
    "bebop_history": ("bebop_history", False, 0),
    "siblings": ("history", True, 0),
    "in-flight": ("history", True, 1),
}


@pytest.mark.parametrize(
    ("name", "reseeds"),
    slow_but(
        [("history", True)],
        [(name, reseeds) for name in SAME_SEEDS for reseeds in (True, False) if reseeds or name != "bebop_history"],
        True,
    ),
)
@pytest.mark.slow
def test_seeds_that_are_asked_again_draw_from_the_target(
    name: str, reseeds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request drafts from the completion that its own seed drew before; the same random numbers would bias it.

    In bebop_history the head drafts the most, so that so few draws do not show the bias.
    """
    system, siblings, cycles = SAME_SEEDS[name]
    if not reseeds:
        monkeypatch.setattr(Rows, "reseed", lambda rows, sources: None)
    policy, case = tiny(), replace(of_history(system, "", siblings), prompts=REJECTING)
    before = DecodingConfig(system="bebop", draft_tokens=3)
    asked = requests([REJECTING[0]] * FEW, max_new_tokens=5)
    first = generate(TorchEngine(policy, before, slots=FEW, max_length=16), asked)
    engine = TorchEngine(policy, before if cycles else case.decoding, slots=FEW, max_length=16)
    drawn = iter(first)  # rows begin to match in the order of the requests

    def own_past(prompt: Sequence[int]) -> Automaton:
        history = History()
        history.remember(prompt, [next(drawn).token_ids.tolist()])
        return history.of(prompt)

    engine.slots.history.of = own_past  # type: ignore[method-assign]
    started(engine, asked)
    for _ in range(cycles):
        assert not engine.step(), "rows would begin in another order"
    engine.configure(case.decoding)
    done = finished(engine)
    p = smallest_p(case, policy, [done[number] for number in range(FEW)], target_law)
    assert p > LEVEL if reseeds else p < CAUGHT


def test_a_prompt_that_is_looked_up_in_is_part_of_the_seed() -> None:
    """It may hold what the same seed drew before."""
    engine = TorchEngine(tiny(), of_system("ngram").decoding, slots=3, max_length=16)
    for number, prompt in enumerate(((1, 2, 1), (1, 2, 1), (2, 1, 1))):
        engine.add(replace(requests([prompt], max_new_tokens=4, seed=7)[0], id=number))
    uniforms: list[Any] = []
    decoder_of(engine).observers.append(lambda rows, *_: uniforms.append(rows.uniforms.tolist()))
    engine.step()
    [(first, same, other)] = uniforms
    assert first == same != other


def test_every_system_has_a_distribution() -> None:
    """A new system is exact, or says here what it emits."""
    assert {name for name, system in SYSTEMS.items() if not system.exact} == set(LAWS) == set(NOT_THEIRS)


# ---- the class for generation


def generated(case: Case, policy: Policy, fault: Fault | None = None) -> list[Completion]:
    """Return FEW completions of a case by ``bebop.LLM``, without the model's stop token: the law knows none."""
    policy.tokenizer.eos_token, policy.backbone.generation_config.eos_token_id = None, None
    llm = LLM(policy, decoding=case.decoding.system, draft_tokens=case.decoding.draft_tokens, slots=FEW, max_length=16)
    if fault is not None:
        fault(llm.engine)
    params = SamplingParams(temperature=case.temperature, max_new_tokens=TOKENS)
    done = llm.generate([case.prompts[0]] * FEW, params)
    first = np.log(target_law(case, policy, case.prompts[0]).sum((1, 2)))
    assert np.allclose([one.logprobs[0] for one in done], [first[one.token_ids[0]] for one in done], atol=1e-4)
    nothing = np.zeros(0)
    return [Completion(token_ids=np.array(o.token_ids), logprobs=nothing, versions=nothing) for o in done]  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", slow_but([], ["", "one seed", "bonus"]))
def test_generation_from_python_has_the_distribution_of_the_target(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, policy = of_system("bebop", 0.7), tiny()
    if broken == "one seed":
        own = LLM._params
        monkeypatch.setattr(LLM, "_params", lambda llm, params, place: own(llm, params, 0))
    done = generated(case, policy, plant(BonusFromTheLastDraftRow) if broken == "bonus" else None)
    p = smallest_p(case, policy, done, target_law)
    assert p < CAUGHT if broken else p > LEVEL


# ---- broken variants


def plant(kind: Any) -> Fault:
    """Return what puts a broken class into the place of the engine's own."""

    def planted(engine: TorchEngine) -> None:
        if issubclass(kind, PairDecoder):
            engine.decoder.__class__ = kind
            return
        decoder = decoder_of(engine)
        if issubclass(kind, SlotContext):
            decoder.target.cache.__class__ = kind
        elif issubclass(kind, Pages):
            assert engine.slots.pages is not None
            engine.slots.pages.__class__ = kind
        elif hasattr(kind, "accept"):
            decoder.rule = kind(engine.policy, engine.slots, engine.decoding)
        else:
            assert decoder.drafter is not None
            decoder.drafter.__class__ = kind

    return planted


BROKEN: dict[str, tuple[Case, type]] = {
    "bonus": (of_system("bebop", 0.7), BonusFromTheLastDraftRow),
    "residual": (of_system("bebop", 0.7), ResidualIsTheTarget),
    "unprocessed-draft": (of_system("bebop", 0.7), UnprocessedDraft),
    "unlikely-dropped": (of_system("bebop"), DropUnlikely),
    "stale-row": (replace(of_system("bebop"), paged=False), StaleRow),
    "stale-table": (replace(of_system("bebop"), paged=True), StaleTable),
    "number-of-drafts-knows-their-fate": (of_system("bebop", drafts="auto"), OnlyWhatWillStand),
    "temperature-peeks": (CHOSEN_TEMPERATURES["bebop"], PeekingTemperature),
    "temperature-not-told": (replace(CHOSEN_TEMPERATURES["bebop"], prompts=REJECTING), OtherTemperature),
    "target_only-residual": (of_system("target_only", 0.7), ResidualIsTheTarget),
    "block-rule-last-that-passes": (replace(of_system("bebop_block", 0.7), prompts=REJECTING), LastThatPasses),
    "tree-parent": (TREES["bebop_tree-five-1.0"], WrongParent),
    "tree-row-of-the-parent": (replace(TREES["bebop_tree-five-1.0"], prompts=REJECTING), RowOfTheParent),
    "firp-row-of-the-parent": (TREES["firp-five-1.0"], RowOfTheParent),
    "firp-drawn-again": (TREES["firp-five-1.0"], DrawnAgain),
    "firp_chain-next-draft": (of_system("firp_chain"), TakesTheNextDraft),
    "draft_model-q-of-the-next-pass": (of_system("draft_model"), TakesTheNextDraft),
    "draft_model-q-before-temperature": (replace(of_system("draft_model", 0.7), prompts=REJECTING), UnprocessedDraft),
    "block-next-slot": (of_system("block"), TakesTheNextDraft),
    **{f"eagle3-{kind.__name__}": (of_system("eagle3"), kind) for kind in EAGLE3},
    "mixture-head-reported": (MIXTURES["overlapping"], HeadReported),
    "mixture-peeks": (MIXTURES["overlapping"], Peeking),
    "history-flatter": (HISTORY["history-overlapping"], Flatter),
    "pad-state": (PAD["pred-1.0"], WrongState),
    "pad-stops": (PAD["pred-1.0"], OverridesStops),
    "pad-ends": (PAD["pred-1.0"], EndsAtOverrides),
    "pipo-token-before": (PIPO["confidence"], DraftsFromTheTokenBefore),
    "pipo-rejected-fed": (PIPO["confidence"], FeedsRejectedDrafts),
    "pipo-one-uniform": (PIPO["confidence"], OneUniformForBoth),
    "pipo-likely-kept": (PIPO["confidence"], KeepsLikelyDrafts),
}
"""Each kind of fault, and the system in which it is planted."""

CAUGHT_BY_FEW = ("bonus", "target_only-residual", "block-rule-last-that-passes")  # one of each acceptance rule
CAUGHT_SLOWLY = ("stale-row", "temperature-not-told", "pad-state", "pipo-token-before")


@pytest.mark.parametrize(("name", "draws"), few_and_many(CAUGHT_BY_FEW, BROKEN, CAUGHT_SLOWLY))
def test_broken_variants_are_caught(name: str, draws: int) -> None:
    case, kind = BROKEN[name]
    policy = case.model()
    done = answers(case, policy, draws, plant(kind))
    assert smallest_p(case, policy, done, LAWS.get(case.decoding.system, target_law)) < CAUGHT
