"""Data types of a job: prompt -> completion -> trajectory -> group -> batch.

Invariants:

- Every *token* has a weight version: a completion may straddle a weight update.
- ``logprobs`` is log p(token) under the target distribution that produced the token, temperature and truncation
  included. This holds for accepted, recovered and bonus tokens alike; it is never the draft's log q.
- Trajectories are append-only: the policy's output is never rendered or tokenised again.
- A trace has one row for each token, aligned with ``Completion.token_ids``. One row of the target decides a place of a
  completion, so p is known at all of them, and q where a draft was tested. Probabilities are those of verification,
  temperature and truncation applied. They are stored for the ``TOP`` likeliest tokens, so the storage per token is
  bounded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bebop.config.job import TraceMode
from bebop.errors import UserError

FinishReason = Literal["stop", "length", "abort"]
# Why a trajectory ended: its only completion ended; its environment ended; a turn reached its length limit; or a budget
# of turns, of tokens or of seconds was spent.
Ending = Literal["answered", "done", "length", "turns", "tokens", "seconds"]

# Sums for every draft position: cycles that reached it, and sums over those.
DRAFT_STATS = ("reached", "accepted", "overlap", "target_only", "draft_entropy", "target_entropy")
MEASURED = DRAFT_STATS[2:]  # these need both distributions, which an engine may give for some cycles only
WEIGHED = "weighed"  # counter of such an engine, [K]: the cycles that the measured ones represent
# Counts of a whole completion.
STAT_COUNTS = ("cycles", "tokens", "prefilled", "target_forwards", "draft_forwards", "extra_positions")
STRETCH = 64  # tokens: statistics by stretches up to 64, 128, 256, ... show how drafting changes
OPENING = -1  # instead of the start of a stretch: the first cycle of a turn, by itself

# Origin of a token, by index: drawn without a draft; an accepted draft; drawn after a rejection; drawn
# after all drafts of its cycle were accepted; or not reported by the engine.
VERDICTS = ("plain", "accepted", "recovered", "bonus", "unknown")
TOP = 8  # tokens of p and of q whose probabilities are kept
NONE = -1  # marks a missing token


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling distribution of one request, applied in this order: penalty, temperature, top-k, top-p, min-p (SPEC
    0.4).

    >>> SamplingParams(temperature=1.0, max_new_tokens=64, seed=7)  # doctest: +SKIP
    """

    temperature: float = 1.0  # 0 means greedy
    top_k: int = 0  # 0 means all
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and completion, as transformers does
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()  # include the end-of-text token; part of the tokens, not of the text
    stop: tuple[str, ...] = ()  # the token that completes one of these is the last; the text keeps the string
    seed: int = 0

    @property
    def truncated(self) -> bool:
        """Return whether the distribution is anything but softmax(logits / temperature)."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.repetition_penalty != 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """Question with a permanent number, its place in the prompt stream.

    >>> Prompt(index=3, task="gcd", text="<user>Find ...", token_ids=(2, 17), item={"answer": "4"})  # doctest: +SKIP
    """

    index: int  # place in the prompt stream, used exactly once; negative: an evaluation's question, asked repeatedly
    task: str
    text: str  # after the chat template
    token_ids: tuple[int, ...]  # [P]
    item: dict[str, Any]  # input of the reward function beside the completion
    question: int | None = None  # its number in a finite set that repeats each epoch; None: it is asked once
    epoch: int = 0  # how many times the whole set was asked before

    @property
    def held_out(self) -> bool:
        """Return whether the question is held out for evaluations, so that no update uses its completions."""
        return self.index < 0

    @property
    def number(self) -> int:
        """Return the number of the question, the same each time it is asked."""
        return self.index if self.question is None else self.question


def same_beginning(one: Prompt, other: Prompt) -> None:
    """Raise ``UserError`` unless members of a group begin with the same tokens; else they cannot be compared."""
    if one.token_ids == other.token_ids:
        return
    a, b = one.token_ids, other.token_ids
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    found = [str(ids[place]) if place < len(ids) else "its end" for ids in (a, b)]
    raise UserError(
        f"environment {one.task}: members of the group of prompt {one.index} begin differently (token {place}: "
        f"{found[0]} and {found[1]}): what reset gives may depend on its item and its seed alone"
    )


@dataclass(slots=True, kw_only=True)
class DecodeStats:
    """Sums over the decoding cycles of one request, or of many: ``+`` adds them. Position k counts from 0.

    Sums over positions are over cycles that *reached* the position. So ``accepted[k] / reached[k]`` and
    ``overlap[k] / reached[k]`` both estimate the conditional acceptance rate (SPEC 0.6: counts, Rao-Blackwell). Tokens
    beyond the end of a completion count nowhere: not as a token, not as reached, not as accepted. In a tree of drafts k
    is the depth, which is reached if a node of the accepted path has children; probabilities are those of the first
    child.
    """

    cycles: int = 0  # verification passes (each emits accepted + 1 tokens, fewer at the end of a completion)
    tokens: int = 0  # tokens of the completion
    prefilled: int = 0  # tokens from a prefill, not from a cycle (SGLang's first; the embedded engine has none)
    target_forwards: int = 0  # backbone passes in which the request took part, prefill excluded
    draft_forwards: int = 0  # MTP passes in which the request took part
    extra_positions: int = 0  # unverified positions in the backbone passes, such as states of future tokens
    reached: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [K] cycles that tested draft k
    accepted: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [K]
    overlap: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [K] sum of sum_v min(p, q)
    target_only: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [K] sum of p(argmax q)
    draft_entropy: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [K] nats
    target_entropy: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))  # [K] nats
    counts: dict[str, NDArray[np.float64]] = field(default_factory=dict)  # name -> [K], counters of a system

    def __add__(self, other: "DecodeStats") -> "DecodeStats":
        summed: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in STAT_COUNTS}
        summed |= {name: _add(getattr(self, name), getattr(other, name)) for name in DRAFT_STATS}
        both, none = {**self.counts, **other.counts}, np.zeros(0)
        counts = {name: _add(self.counts.get(name, none), other.counts.get(name, none)) for name in both}
        return DecodeStats(**summed, counts=counts)

    @classmethod
    def total(cls, parts: Iterable["DecodeStats"]) -> "DecodeStats":
        """Return the sum of statistics, for instance of several completions."""
        return sum(parts, cls())

    @classmethod
    def with_drafts(cls, drafts: int, **known: Any) -> "DecodeStats":
        """Return statistics with the fields ``known``, and zeros for ``drafts`` draft positions in all others."""
        return cls(**{name: np.zeros(drafts) for name in DRAFT_STATS} | known)

    def add_measured(self, measured: Mapping[str, Sequence[float]], reached: int, weight: float) -> None:
        """Add a cycle's overlap and entropies at the first ``reached`` positions.

        ``weight`` is the number of cycles that the measured one represents, so that sum / reached estimates the mean.
        """
        self.counts.setdefault(WEIGHED, np.zeros(len(self.reached)))[:reached] += weight
        for name in MEASURED:
            getattr(self, name)[:reached] += weight * np.asarray(measured[name])[:reached]

    @property
    def emitted(self) -> int:
        """Return the number of tokens that the cycles emitted."""
        return self.tokens - self.prefilled

    @property
    def accept_length(self) -> float:
        """Return the tokens per cycle: accepted drafts + 1, less those cut off at the end; NaN without a cycle."""
        return self.emitted / self.cycles if self.cycles else float("nan")


def _add(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Add two arrays [K]; the shorter one counts as zero beyond its end."""
    if len(a) < len(b):
        a, b = b, a
    total = a.copy()
    total[: len(b)] += b
    return total


def add_stretches(
    before: tuple[tuple[int, DecodeStats], ...], after: tuple[tuple[int, DecodeStats], ...]
) -> tuple[tuple[int, DecodeStats], ...]:
    """Add the statistics by stretch of two parts of an interrupted completion."""
    stretches = dict(before)
    for start, stats in after:
        stretches[start] = stretches.get(start, DecodeStats()) + stats
    return tuple(sorted(stretches.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Origin of each of T tokens; values that an engine does not know are NONE or NaN.

    M is ``TOP``, or the size of the vocabulary if that is smaller.
    """

    verdicts: NDArray[np.int8]  # [T] index into VERDICTS
    cycles: NDArray[np.int32]  # [T] the cycle that emitted it, from 0; the count continues after an interruption
    drafters: NDArray[np.int8]  # [T] index into ``names`` for the tested draft; NONE: no draft was tested
    names: tuple[str, ...]  # names of drafters, equal to those of the modules in rollout/decoding/drafters
    drafts: NDArray[np.int32]  # [T] the token drafted for this place, accepted or not; NONE: none was tested
    draft_target_probs: NDArray[np.float32]  # [T] p of that draft
    draft_probs: NDArray[np.float32]  # [T] q of that draft; 1 for a greedy or looked-up draft
    overlap: NDArray[np.float32]  # [T] sum of min(p, q)
    target_entropy: NDArray[np.float32]  # [T] nats
    draft_entropy: NDArray[np.float32]  # [T] nats
    target_ids: NDArray[np.int32]  # [T, M] likeliest tokens of p, the likeliest first
    target_top: NDArray[np.float16]  # [T, M] their p
    draft_ids: NDArray[np.int32]  # [T, M] likeliest tokens of q
    draft_top: NDArray[np.float16]  # [T, M] their q

    def __len__(self) -> int:
        return len(self.verdicts)


def spread_trace(trace: Trace, places: NDArray[np.bool_]) -> Trace:
    """Return a trace of T rows with the rows of ``trace`` where ``places`` [T] is true, and empty rows elsewhere."""

    def laid(name: str) -> NDArray[Any]:
        rows = getattr(trace, name)
        missing = VERDICTS.index("unknown") if name == "verdicts" else np.nan if rows.dtype.kind == "f" else NONE
        table = np.full((len(places), *rows.shape[1:]), missing, dtype=rows.dtype)
        table[places] = rows
        return table

    return Trace(names=trace.names, **{f.name: laid(f.name) for f in fields(Trace) if f.name != "names"})


def is_traced(mode: TraceMode, index: int, groups_per_step: int) -> bool:
    """Return whether the completions of prompt ``index`` are traced; "sample": the first of ``groups_per_step``."""
    return mode == "all" or (mode == "sample" and index % groups_per_step == 0)


def join_traces(parts: Sequence[Trace]) -> Trace:
    """Return the trace of a completion from those of its consecutive parts."""
    names = tuple(dict.fromkeys(name for part in parts for name in part.names))
    arrays = {f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(Trace) if f.name != "names"}
    places = [np.array([names.index(name) for name in part.names] + [NONE], dtype=np.int8) for part in parts]
    arrays["drafters"] = np.concatenate([own[p.drafters] for own, p in zip(places, parts, strict=True)])
    starts = np.cumsum([0, *(int(part.cycles[-1]) + 1 if len(part) else 0 for part in parts)])
    arrays["cycles"] = np.concatenate(
        [
            np.where(p.cycles == NONE, p.cycles, p.cycles + np.int32(at))
            for p, at in zip(parts, starts[:-1], strict=True)
        ]
    )
    return Trace(names=names, **arrays)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """Output of the policy in one turn, as the engine produced it.

    >>> ids, logp = np.array([5, 1]), np.array([-0.2, -0.01])
    >>> Completion(token_ids=ids, logprobs=logp, versions=np.array([0, 1]), text="4")  # doctest: +SKIP
    """

    token_ids: NDArray[np.int64]  # [T], the stop token included
    logprobs: NDArray[np.float32]  # [T] log p under the target's distribution that produced the token
    versions: NDArray[np.int64]  # [T] weight version that produced the token
    contexts: NDArray[np.int64] | None = None  # [T] oldest version among the keys and values it saw; see ``oldest``
    text: str = ""  # without the stop token, see ``rollout.detokenize``
    finish_reason: FinishReason = "stop"
    stats: DecodeStats = field(default_factory=DecodeStats)
    stretches: tuple[tuple[int, DecodeStats], ...] = ()  # stats by start of the cycle, see STRETCH; may be missing
    exact: bool = True  # False: the decoding system changes the output distribution
    # [T] log-prob under the distribution that an inexact system drew the token from; None: not known, or exact.
    sampled_logprobs: NDArray[np.float32] | None = None
    # State by name that the decoding system needs to continue an aborted completion; optional for a finished one.
    state: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)
    trace: Trace | None = None  # origin of each token, if traced
    mask: NDArray[np.bool_] | None = None  # [T] tokens that the policy wrote, in joined turns; None: all of them
    # [N, R, k] experts that the routers of R layers chose for the last N tokens read or written, in the target's pass
    # that computed them; -1 if unknown, as for the last token. None: nothing is recorded.
    routing: NDArray[np.int8 | np.int16] | None = None

    @property
    def written(self) -> NDArray[np.bool_]:
        """Return a mask [T] of the tokens that the policy wrote."""
        return np.ones(len(self.token_ids), dtype=np.bool_) if self.mask is None else self.mask

    @property
    def oldest(self) -> NDArray[np.int64]:
        """Return [T] the oldest weights that took part in each token, also through kept keys and values.

        An engine that does not report this is assumed to keep everything; then it is the oldest version so far.
        """
        return np.minimum.accumulate(self.versions) if self.contexts is None else self.contexts

    @property
    def drawn_logprobs(self) -> NDArray[np.float32]:
        """Return the log-prob [T] under the distribution from which each token was drawn, if ``weighable`` holds."""
        return self.logprobs if self.sampled_logprobs is None else self.sampled_logprobs

    @property
    def weighable(self) -> bool:
        """Return whether the distribution of each token is known, so that importance weights exist."""
        return self.exact or self.sampled_logprobs is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Tokens that the policy read, followed by its completion."""

    observation: NDArray[np.int64]  # [O] tokens since the previous turn; empty in the first, which reads the prompt
    completion: Completion  # [T], T >= 1 in all but the first


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One or more turns with their reward.

    The tokens are prompt, first completion, observation, completion, ... Observations are context: they have no
    log-prob, no version and no loss.
    """

    turns: tuple[Turn, ...]  # at least one
    reward: float
    timed_out: bool = False  # the reward function hung, so the reward of 0 is not a judgement
    ended: Ending = "answered"
    restarts: int = 0  # how many times its environment was lost and it began again
    environment_seconds: float = 0.0  # spent in its environment, including lost ones
    counts: Mapping[str, float] = field(default_factory=dict)  # further counts of its environment, by name
    parts: Mapping[str, float | None] = field(default_factory=dict)  # of its reward, by name; None: it does not apply

    @classmethod
    def single(
        cls,
        completion: Completion,
        reward: float,
        timed_out: bool = False,
        parts: Mapping[str, float | None] | None = None,
    ) -> "Trajectory":
        """Create a trajectory of one turn, without an environment."""
        turn = Turn(observation=np.zeros(0, dtype=np.int64), completion=completion)
        return cls(turns=(turn,), reward=reward, timed_out=timed_out, parts=parts or {})

    @property
    def completion(self) -> Completion:
        """Return the completion of a single turn, or all turns joined, with the observations in between."""
        return self.turns[0].completion if len(self.turns) == 1 else join_turns(self.turns)

    @property
    def written(self) -> int:
        """Return the number of tokens that the policy wrote."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


def before(turns: Sequence[Turn], place: int) -> list[int]:
    """Return the tokens between the prompt and the completion of turn ``place``, its observation included."""
    parts = [ids for turn in turns[:place] for ids in (turn.observation, turn.completion.token_ids)]
    return [int(token) for part in (*parts, turns[place].observation) for token in part]


def join_turns(turns: Sequence[Turn]) -> Completion:
    """Return turns as one completion [T] whose ``mask`` marks the tokens that the policy wrote.

    At observations log-probs are 0 and versions those of the previous token; neither is ever read. ``state``, ``trace``
    and ``stretches`` exist only for single turns, and are left out.
    """
    parts = [turn.completion for turn in turns]
    observed = [len(turn.observation) for turn in turns]

    def laid(of: Callable[[Completion], NDArray[Any]], between: Callable[[int], Any]) -> NDArray[Any]:
        rows = [of(part) for part in parts]
        filled = [np.full(n, between(i), dtype=rows[0].dtype) for i, n in enumerate(observed)]
        return np.concatenate([piece for pair in zip(filled, rows, strict=True) for piece in pair])

    def before(values: Callable[[Completion], NDArray[Any]]) -> Callable[[int], Any]:
        return lambda i: values(parts[i - 1])[-1] if i else 0

    sampled = None
    if any(part.sampled_logprobs is not None for part in parts):
        sampled = laid(lambda part: part.drawn_logprobs, lambda _: 0.0)
    return Completion(
        token_ids=np.concatenate([ids for turn in turns for ids in (turn.observation, turn.completion.token_ids)]),
        logprobs=laid(lambda part: part.logprobs, lambda _: 0.0),
        versions=laid(lambda part: part.versions, before(lambda part: part.versions)),
        contexts=laid(lambda part: part.oldest, before(lambda part: part.oldest)),
        text=parts[-1].text,
        finish_reason=parts[-1].finish_reason,
        stats=DecodeStats.total(part.stats for part in parts),
        exact=all(part.exact for part in parts),
        sampled_logprobs=sampled,
        mask=laid(lambda part: np.ones(len(part.token_ids), dtype=np.bool_), lambda _: False),
        routing=_routing_of(turns),
    )


def aligned(routing: NDArray[Any], length: int) -> NDArray[Any]:
    """Return the routing [length, R, k] of ``length`` tokens, from ``routing`` [N, R, k] of their last N or more."""
    whole = np.full((length, *routing.shape[1:]), NONE, dtype=routing.dtype)
    own = routing[max(0, len(routing) - length) :]
    whole[length - len(own) :] = own
    return whole


def join_routing(
    before: NDArray[np.int8 | np.int16] | None, after: NDArray[np.int8 | np.int16] | None, added: int
) -> NDArray[np.int8 | np.int16] | None:
    """Return the routing of a text extended by ``added`` tokens; for a token in both parts, that of ``before``.

    The token's successor was sampled under that routing, whereas ``after`` may have read the token again.
    """
    if before is None:
        return after
    whole = np.concatenate([before, np.full((added, *before.shape[1:]), NONE, dtype=before.dtype)])
    if after is None:
        return whole
    length = max(len(whole), len(after))
    whole, own = aligned(whole, length), aligned(after, length)
    joined: NDArray[Any] = np.where(whole == NONE, own, whole)
    return joined


def _routing_of(turns: Sequence[Turn]) -> NDArray[np.int8 | np.int16] | None:
    whole: NDArray[Any] | None = None
    for turn in turns:
        added = len(turn.observation) + len(turn.completion.token_ids)
        whole = join_routing(whole, turn.completion.routing, added)
    return whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Trajectories of one prompt, G of them, which GRPO compares with one another."""

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]  # G, less the lost ones
    lost: int = 0  # members whose environments were lost too often, which count nowhere else


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Groups of one update, in prompt order."""

    groups: tuple[Group, ...]

    @property
    def trajectories(self) -> list[Trajectory]:
        """Return all trajectories, group by group."""
        return [t for group in self.groups for t in group.trajectories]
