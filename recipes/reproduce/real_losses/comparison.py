"""Numbers for findings.py: the arms of the losses, their comparisons, and the stages of training."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from bebop.adaptation.probe import Probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real import arms
from recipes.reproduce.real import slopes as entropy
from recipes.reproduce.real.arms import Arm, Measured, each
from recipes.reproduce.real.effects import Statistic, accept_length, mean_of
from recipes.reproduce.real.evaluation import TEMPERATURES
from recipes.reproduce.real.runs import BRIEF, SHARED
from recipes.reproduce.real.runs import CONVERGED as LONGEST
from recipes.reproduce.real.runs import FRESH as BEGUN
from recipes.reproduce.real_losses.findings import BASES, CUT, GREEDY, MARKS

FRESH = "fresh "  # prefix of heads from the fitted start
OURS = "e2e_tv"
ALL_MARKS = tuple(mark for marks in MARKS.values() for mark in marks)
TEST, UNSEEN = "test", "unseen"  # splits
NAMES = (SHARED, *LONGEST, *BRIEF, "kl", *(f"{FRESH}{name}" for name in BEGUN))  # names of all arms
COMPARED = (
    *((OURS, base) for base in (*BASES, "tv")),
    *((f"{FRESH}{OURS}", f"{FRESH}{base}") for base in BASES),
    *(("tv", cut) for cut in CUT),
)
SLOPED = (OURS, *BASES)


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """Selection of heads, text and drafts for one comparison: When(words=" at step 100", at="step 100")."""

    words: str  # after "accept length"
    at: str = "best"
    split: str = TEST
    greedy: bool = False

    def statistics(self, place: Path, name: str) -> Arm[Statistic]:
        """Return the accept length of every head of an arm."""
        what = greedy_length if self.greedy else accept_length
        return each(heads(place, name, self.at, split=self.split), what)


BEST, GREEDILY = When(words=""), When(words=" greedy", greedy=True)
ON_UNSEEN = When(words=" on unseen kinds", split=UNSEEN)
AT_MARKS = tuple(When(words=f" at {mark}", at=mark) for mark in ALL_MARKS)
TIMES = (BEST, GREEDILY, ON_UNSEEN, *AT_MARKS)


@cache
def heads(place: Path, name: str, at: str = "best", sampling: Sampling = arms.PLAIN, split: str = TEST) -> Arm[Probe]:
    """Return the chains of an arm by its name, such as "fresh ce"; each file is read once."""
    return arms.heads(place, name.removeprefix(FRESH), at, sampling, split, fresh=name.startswith(FRESH))


def everything(place: Path) -> Iterator[list[Probe]]:
    """Yield all existing chains of each split."""
    swept = [Sampling(temperature=t) for t in TEMPERATURES if t != 1]
    yield [
        *(one for name in NAMES for at in ("best", *ALL_MARKS) for one in heads(place, name, at).values()),
        *(one for name in SLOPED for sampling in swept for one in heads(place, name, sampling=sampling).values()),
    ]
    yield [one for name in NAMES for one in heads(place, name, split=UNSEEN).values()]


def measure(place: Path) -> Measured:
    """Return all numbers and facts that the existing chains allow.

    Raises:
        UserError: The heads were not all evaluated on the same chains.
    """
    for chains in everything(place):
        arms.same_chains(chains)
    told = Measured()
    for name in (*LONGEST, *BRIEF):
        told.curves(place, name)
    lengths(told, place)
    halves(told, place)
    along_chains(told, place)
    slopes(told, place)
    return told


def lengths(told: Measured, place: Path) -> None:
    """Add the accept lengths of all compared arms, and their differences, for every entry of ``TIMES``."""
    for when in TIMES:
        statistics = {name: when.statistics(place, name) for name in dict.fromkeys(sum(COMPARED, ()))}
        for name, arm in statistics.items():
            told.arm(f"{name}, accept length{when.words}", arm)
        for first, second in COMPARED:
            number = f"{first} - {second}, accept length{when.words}"
            told.difference(number, statistics[first], statistics[second])


def halves(told: Measured, place: Path) -> None:
    """Add half of the gain of sampled drafts minus that of greedy ones, computed for each head by itself."""
    first, second = (each(heads(place, name), half_less_greedy) for name in (OURS, "ce"))
    told.difference(GREEDY, first, second)


def along_chains(told: Measured, place: Path) -> None:
    """Add the overlap lost from the first draft of a chain to the last."""
    _with_differences(told, "overlap lost along a chain", lambda name: each(heads(place, name), lost_overlap))


def slopes(told: Measured, place: Path) -> None:
    """Add the slopes of sampled drafts' acceptance on the target's entropy, over each kind of points.

    Also adds the slope of end-to-end TV minus half of that of ``ce``.
    """
    for way, of in WAYS.items():
        _with_differences(told, f"slope over {way}", lambda name, of=of: of(place, name))  # type: ignore[misc]
        half = each(of(place, "ce"), lambda one: Statistic(one.sums, lambda sums: one.of(sums) / 2))
        told.difference(f"{OURS} - half of ce, slope over {way}", of(place, OURS), half)


def _with_differences(told: Measured, what: str, of: Callable[[str], Arm[Statistic]]) -> None:
    """Add a number of end-to-end TV and of each base, and their differences."""
    statistics = {name: of(name) for name in (OURS, *BASES)}
    for name, arm in statistics.items():
        told.arm(f"{name}, {what}", arm)
    for base in BASES:
        told.difference(f"{OURS} - {base}, {what}", statistics[OURS], statistics[base])


# ---- slopes of an arm


def swept(place: Path, name: str) -> Arm[list[Probe]]:
    """Return the chains of each head at all temperatures, for the heads that were evaluated at all of them."""
    looks = [heads(place, name, sampling=Sampling(temperature=t)) for t in TEMPERATURES]
    return {seed: [look[seed] for look in looks] for seed in looks[0] if all(seed in look for look in looks)}


def over_temperatures(place: Path, name: str) -> Arm[Statistic]:
    """Return the slope of each head with one point per temperature."""
    return each(swept(place, name), lambda looks: entropy.over_temperatures(looks, "overlap"))


def between_prompts(place: Path, name: str) -> Arm[Statistic]:
    """Return the slope of each head with one point per prompt, minus the mean of its kind."""
    return each(heads(place, name), lambda chains: entropy.between_prompts(chains, "overlap"))


def between_tokens(place: Path, name: str) -> Arm[Statistic]:
    """Return the slope of each head with one point per context and position."""
    return each(heads(place, name), lambda chains: entropy.between_tokens(chains, "overlap"))


WAYS: Mapping[str, Callable[[Path, str], Arm[Statistic]]] = {
    "temperatures": over_temperatures, "prompts": between_prompts, "tokens": between_tokens,
}  # fmt: skip


# ---- of one head


def greedy_length(chains: Probe) -> Statistic:
    """Return the tokens per cycle with greedy drafts."""
    return mean_of(chains, chains.accept_greedy)


def half_less_greedy(chains: Probe) -> Statistic:
    """Return half of the accept length of sampled drafts minus that of greedy ones."""
    return mean_of(chains, chains.accept / 2 - chains.accept_greedy)


def lost_overlap(chains: Probe) -> Statistic:
    """Return the overlap of the first draft minus that of the last, over the chains that have a last one."""
    overlap = chains.numbers["overlap"]
    return mean_of(chains, overlap[:, 0] - overlap[:, -1])
