"""The certificate's black box on a job's own completions: the trainer's distributions are the reference.

Which tokens may be bet on
--------------------------
A bet is fair if it is settled before the token is drawn whether it is made, and on what.

- *Completions* are fixed by their numbers (``bebop.monitor.certified.chosen``). They are weighed in the order of the
  prompts, whenever and however they ended.
- In a trajectory of several turns *one turn* is tested, which is fixed by a number as well (``turn_looked_at``). That
  there is such a turn is settled before its first token is drawn. Everything before it is its prompt. Completions lost
  with their environments cannot be tested: an environment that crashes on certain texts looks like an engine that
  avoids them.
- *Places* in completions are fixed by numbers as well (``window``): at most ``SPAN`` tokens of a completion, so that
  a reading does not cost more with long completions.
- *Weights*: a token counts if one available version produced it and all keys and values that it saw. Weights change
  between two cycles, at a moment that the trainer's clock sets, so a token's version is settled when its cycle begins.
  Whether it belongs to the cycle before the change or to the one after says nothing about it either: an exact system
  draws it from p in both cases, only with another p. The bound on staleness keeps every version that occurs available.
  The exception are completions from before a resume, which the monitor leaves out.

The distribution is softmax(logits / temperature) of the trainer's forward pass, in the dtype of its products. For older
versions it is computed under the weights as they are sent to engines. With a large vocabulary the likeliest ``COLUMNS``
tokens have columns of their own and the rest have one in common. Each rank scores its share; rank 0 orders the results
and holds the one ledger. Evidence of several ledgers could be multiplied, but each would have to find a fault with a
part of the tokens.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from bebop.certify.answers import Answer, Block, cells, columns, narrow
from bebop.certify.certificate import cause
from bebop.certify.declared import tolerance
from bebop.certify.ledger import Ledger
from bebop.config.job import MAX_BATCH_TOKENS, JobConfig
from bebop.monitor.certified import PAIRS, Certified
from bebop.trainer.old_policies import OldPolicies
from bebop.trainer.packing import PackedRows, Row, pack
from bebop.trainer.scorer import Scorer, whole_tables
from bebop.trajectory import Completion, Group, before

log = logging.getLogger(__name__)

COLUMNS = 1024  # of a block; of a larger vocabulary the likeliest tokens have one each, and the rest one in common
SPAN = 256  # most places of a completion that are tested
ALPHA = 1e-4  # the chance of an alarm in a whole run without a fault
LIMIT = -math.log(ALPHA)
MAX_METRIC = 1e6  # of a metric

Places = dict[int, NDArray[np.int64]]  # version -> places of a completion


def window(number: int, limit: int) -> range:
    """Return the places of pair ``number`` that may be tested, where completions have up to ``limit`` tokens.

    They are 0-255, 256-511, 512-767, 1024-1279, 2048-2303, ... in turns. So all parts of long completions are tested,
    and most often those parts that most completions have.
    """
    starts = [0]
    while (following := max(SPAN, 2 * starts[-1])) < limit:
        starts.append(following)
    start = starts[number % len(starts)]
    return range(start, start + SPAN)


def turn_looked_at(number: int, most: int) -> tuple[int, int]:
    """Return the turn of pair ``number`` that is tested, of at most ``most``, and the pair's number for this turn.

    Turns are 0, 1, 2, 4, 8, ... one after another. The pair's number counts the pairs of the same turn.
    """
    turns = [0]
    while (following := max(1, 2 * turns[-1])) < most:
        turns.append(following)
    return turns[number % len(turns)], number // len(turns)


def fair(completion: Completion, span: range, versions: Sequence[int]) -> Places:
    """Return the places of a completion that may be bet on, by version.

    A token's version has to be available, and has to be that of its whole context.
    """
    own = completion.versions
    inside = np.arange(len(own))
    known = (own == completion.oldest) & np.isin(own, versions) & (inside >= span.start) & (inside < span.stop)
    return {int(v): inside[known & (own == v)] for v in np.unique(own[known])}


# ---- from rows of the trainer's logits to a block


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Scores of some places of a completion under one version's weights; columns as in a ``Block``, on the CPU."""

    answer: int  # its number in the reading
    places: Tensor  # [n]
    logprobs: Tensor  # [n] of the tokens themselves
    probs: Tensor  # [n, M]
    before: Tensor  # [n, M]
    raw: Tensor | None  # [n, M]
    ids: Tensor | None  # [n, M]


def score(
    number: int, answer: Answer, places: Tensor, logits: Tensor, temperature: float, stops: Sequence[int]
) -> Scored:
    """Return the scores of places [n] of a completion, given the logits [2, n, V] there and one place before."""
    logits = logits.double()
    p, before = (logits / temperature).softmax(-1)
    raw = None if temperature == 1.0 else logits[0].softmax(-1)
    tokens, last = (ids[places].to(p.device) for ids in _tokens(answer))
    wide = {"probs": p, "before": before} | ({} if raw is None else {"raw": raw})
    ids = None if p.shape[1] <= COLUMNS else likely(list(wide.values()), last, stops, COLUMNS)
    table = {name: (full if ids is None else narrow(full, ids)).cpu() for name, full in wide.items()}
    return Scored(
        answer=number,
        places=places,
        logprobs=(logits[0] / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0].cpu(),
        probs=table["probs"],
        before=table["before"],
        raw=table.get("raw"),
        ids=None if ids is None else ids.cpu(),
    )


def likely(tables: Sequence[Tensor], last: Tensor, stops: Sequence[int], count: int) -> Tensor:
    """Return the ids [n, count] that get columns, in order; the last column is -1 and stands for all other tokens.

    They are known before the token is: the likeliest tokens under any of ``tables`` [n, V], the token before, ``last``
    [n], and the tokens that end completions.
    """
    rank = torch.stack(list(tables)).amax(0)
    rank.scatter_(1, last[:, None], torch.inf)
    rank[:, list(stops)] = torch.inf
    ids = rank.topk(count - 1, -1).indices.sort(-1).values
    return torch.cat([ids, torch.full_like(ids[:, :1], -1)], 1)


def seen(answer: Answer, one: Scored) -> Tensor:
    """Return whether the token of each column occurred before each place, [n, M]."""
    width = one.probs.shape[1] if one.ids is None else int(one.ids.max()) + 1
    never = np.iinfo(np.int64).max
    first = torch.full((width,), never)
    for place, token in reversed(list(enumerate([*answer.prompt, *answer.token_ids.tolist()]))):
        if token < width:
            first[token] = place - len(answer.prompt)
    if one.ids is None:
        return first < one.places[:, None]
    return (first[one.ids.clamp_min(0)] < one.places[:, None]) & (one.ids >= 0)


def block_of(answers: Sequence[Answer], scored: Sequence[Scored], stops: tuple[int, ...]) -> Block:
    """Return the ledger's block: the places of all parts, in order. Engines report log p at the temperature."""
    starts = np.cumsum([0, *(len(answer.token_ids) for answer in answers)])
    index = torch.cat([int(starts[one.answer]) + one.places for one in scored])
    common = {name: None if own is None else own[index] for name, own in columns(answers).items()}

    def joined(name: str) -> Tensor | None:
        parts = [getattr(one, name) for one in scored]
        return None if parts[0] is None else torch.cat(parts)

    ids, logprobs, tokens = joined("ids"), joined("logprobs"), common["tokens"]
    assert tokens is not None
    return Block(
        **common,  # type: ignore[arg-type]
        cells=tokens if ids is None else cells(ids, tokens),
        logprobs=logprobs,  # type: ignore[arg-type]
        probs=joined("probs"),  # type: ignore[arg-type]
        before=joined("before"),
        raw=joined("raw"),
        ids=ids,
        seen=torch.cat([seen(answers[one.answer], one) for one in scored]),
        declared=logprobs,
        stops=stops,
    )


def _tokens(answer: Answer) -> tuple[Tensor, Tensor]:
    """Return the tokens of a completion [T], and the token before each [T]."""
    own = torch.from_numpy(answer.token_ids)
    return own, torch.cat([torch.tensor(answer.prompt[-1:], dtype=torch.int64), own])[: len(own)]


# ---- the ledger


class Certifier:
    """The ledger of a job. All ranks make the same calls."""

    def __init__(
        self, scorer: Scorer, old_policies: OldPolicies, config: JobConfig, rank: int = 0, world: int = 1
    ) -> None:
        """Start with no evidence; ``old_policies`` holds the versions other than the current one."""
        self.scorer, self.old_policies, self.config, self.rank, self.world = scorer, old_policies, config, rank, world
        self.vocabulary = int(scorer.backbone.get_output_embeddings().weight.shape[0])
        self.stops = scorer.policy.eos_token_ids
        self.begin(0)

    def begin(self, since: int) -> None:
        """Start a new ledger, for completions drawn from step ``since`` on."""
        self.since = since
        known = tolerance(self.config.model.dtype)
        self.ledger = Ledger(
            self.vocabulary,
            alpha=ALPHA,
            seed=self.config.runtime.seed,
            tolerance=known.nats,
            allowed=max(known.share, ALPHA),
            enumerate_rows=False,  # the power for so many tokens is half of the work, and no job needs it
        )

    @torch.no_grad()
    def read(self, groups: Sequence[Group], since: int, version: int) -> Certified | None:
        """Test two completions of each group, and return the result of the ledger.

        ``since`` is that of ``driver.protocols.Trainer.certify``, ``version`` that of the policy's weights. Return None
        on ranks above 0, and if any completion is of an inexact system.
        """
        if not all(t.completion.exact for group in groups for t in group.trajectories):
            return None
        if since > self.since:
            self.begin(since)
        first = version // max(1, self.config.monitor.certify_every) * PAIRS  # number of the first pair
        answers, places = self._places(groups, first, [*self.old_policies.versions, version])
        wanted = {v for own in places for v in own}
        older = [v for v in self.old_policies.versions if v in wanted and v != version]
        parts = self.old_policies.visit(older, lambda v: self._score(answers, places, v))
        parts += [self._score(answers, places, version)] if version in wanted else []
        scored = self._gathered([one for part in parts for one in part])
        if self.rank:
            return None
        if scored:
            self.ledger.update(block_of(answers, scored, self.stops))
        return self._certified()

    def _places(
        self, groups: Sequence[Group], first: int, versions: Sequence[int]
    ) -> tuple[list[Answer], list[Places]]:
        """Return completions up to the last place that may be tested, in the order of submission, and fair places."""
        limit, task = self.config.rollout.sampling.max_new_tokens, self.config.task
        most = task.environment.max_turns if task.turns else 1
        answers, places = [], []
        for number, group in enumerate(groups, first):
            turn, own = turn_looked_at(number, most)
            span = window(own, limit)
            for member, trajectory in enumerate(group.trajectories):
                if turn >= len(trajectory.turns):
                    continue
                completion = trajectory.turns[turn].completion
                answers.append(
                    Answer(
                        request=2 * group.prompt.index + member,
                        prompt=(*group.prompt.token_ids, *before(trajectory.turns, turn)),
                        token_ids=completion.token_ids[: span.stop],
                        logprobs=completion.logprobs[: span.stop].astype(np.float64),
                        finish_reason=completion.finish_reason,
                        versions=completion.versions[: span.stop],
                    )
                )
                places.append(fair(completion, span, versions))
        return answers, places

    def _score(self, answers: Sequence[Answer], places: Sequence[Places], version: int) -> list[Scored]:
        """Return this rank's share of the places of one version, whose weights the policy has at the moment."""
        chosen = [number for number, own in enumerate(places) if version in own]
        rows = [_row(answers[number]) for number in chosen]
        policy = self.scorer.policy
        weight = whole_tables(policy)[1] if self.world > 1 else policy.backbone.get_output_embeddings().weight.detach()
        scored = []
        for part in pack(rows, self.config.trainer.max_tokens or MAX_BATCH_TOKENS, self.world)[self.rank :: self.world]:
            packed = part.to(policy.device, self.scorer.loss_dtype)
            for row, states in self._hidden(packed):
                number = chosen[row]
                own = torch.from_numpy(places[number][version])
                logits = self._logits(states, len(answers[number].prompt) - 1 + own, weight)
                scored.append(score(number, answers[number], own, logits, self.scorer.temperature, self.stops))
        return scored

    def _hidden(self, packed: PackedRows) -> list[tuple[int, Tensor]]:
        """Return the row number and the hidden states [length, d] of each row."""
        taps, self.scorer.taps, self.scorer.kept = self.scorer.taps, (), []  # a drafter's layers are not read here
        self.scorer(packed)
        [(_, hidden)], self.scorer.kept, self.scorer.taps = self.scorer.kept, None, taps
        rows = zip(packed.rows.tolist(), hidden.split(packed.lengths.tolist()), strict=True)
        return [(row, states) for row, states in rows if row >= 0]

    def _logits(self, states: Tensor, at: Tensor, weight: Tensor) -> Tensor:
        """Return logits [2, n, V] at some places of a row, and one place before each (for the first place: its own)."""
        index = torch.stack([at, (at - 1).clamp_min(0)]).to(states.device)
        dtype = torch.bfloat16 if self.scorer.mixed else states.dtype
        head: Any = self.scorer.backbone.get_output_embeddings()
        bias = None if getattr(head, "bias", None) is None else head.bias.to(dtype)
        return functional.linear(states[index].to(dtype), weight.to(dtype), bias)

    def _gathered(self, scored: list[Scored]) -> list[Scored]:
        """Return the parts of all ranks on rank 0, in the order of completions and places."""
        parts: list[Any] = [scored]
        if self.world > 1:
            parts = [None] * self.world
            dist.gather_object(scored, parts if self.rank == 0 else None)
        return sorted((one for part in parts for one in part or ()), key=lambda one: (one.answer, int(one.places[0])))

    def _certified(self) -> Certified:
        """Return the current result of the ledger."""
        ledger = self.ledger
        evidence = ledger.evidence()
        bounds = [one.tv for one in evidence if one.tv is not None]
        found = cause(evidence, odds=ledger.reported_odds) if ledger.highest >= LIMIT else None
        return Certified(
            tokens=ledger.tokens,
            log_e=min(ledger.log_e, MAX_METRIC),
            highest=min(ledger.highest, MAX_METRIC),
            limit=LIMIT,
            tv=max(bounds, default=None),
            cause="" if found is None else found.name,
            sentence="" if found is None else found.sentence,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed run needs to continue with the same evidence; only rank 0's counts."""
        return {"since": self.since, "ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict``; start a new ledger if another version of bebop, with other bets, wrote it."""
        self.begin(state["since"])
        try:
            self.ledger.load_state_dict(state["ledger"])
        except (KeyError, ValueError) as error:
            log.warning("the certificate's evidence begins again: %s", error)
            self.begin(state["since"])


def _row(answer: Answer) -> Row:
    """Return a completion as a row for the trainer's forward pass."""
    assert answer.logprobs is not None and answer.versions is not None
    completion = Completion(
        token_ids=answer.token_ids, logprobs=answer.logprobs.astype(np.float32), versions=answer.versions
    )
    return Row(prompt=answer.prompt, completion=completion, advantage=0.0, weight=0.0)
