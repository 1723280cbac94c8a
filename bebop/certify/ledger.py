"""The black box: do sampled tokens follow the claimed distribution, and if not, in which direction are they off?

It runs a betting martingale for every direction and merges them by fixed weights:

- The directions and weights (``FAMILY``) are fixed before the first token.
- Cohorts are whole and in the order of submission, so the order in which completions end does not matter.
- Bets on a token use only earlier tokens of its own completion and earlier requests.
- Bets learn from earlier cohorts alone.
"""

import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.bets import SAMPLE, WORST, Bets, Bigram, Tilt
from bebop.certify.declared import tolerated
from bebop.certify.directions import (
    BY_PLACE,
    CONTAMINATION,
    DRAFT,
    FLOOR,
    PLACES,
    SHARED_NOISE,
    Rows,
    Table,
    directions,
)
from bebop.certify.evidence import Array, Evidence, Visible, log_sum_exp
from bebop.certify.marginals import BINS, EVENTS, Ids, Pit, Reported, likelier, overlap

# Elements of a table in one chunk: a dozen such tables are alive at a time, and should stay in the cache.
ELEMENTS = 1 << 19
COARSE = 1 << 15  # columns above which fewer rows are enumerated: one row takes as long as all bets on ten
CERTAIN = 1e-6  # least probability of a token whose uniform is compared with another token's
Index = NDArray[np.int64]

# ---- the directions and their weights

COPIES = ("copies", "shared_uniform", "repeated_uniform")
BETS: Mapping[str, tuple[str, ...]] = {
    "contamination": tuple(name for name in CONTAMINATION if name != "copies"),
    "by_cycle": tuple(f"{name}@{place}" for name in BY_PLACE for place in range(PLACES)),
    "draft": (*DRAFT, *(f"{name}@0" for name in DRAFT)),
    "shared_noise": (*SHARED_NOISE, *(f"{name}@0" for name in SHARED_NOISE)),
    "copies": COPIES,
}
PIT_NAMES, EVENT_NAMES = tuple(BINS), tuple(EVENTS)
OTHERS = {"ids": ("ids",), "learned_tilt": ("learned_tilt",), "pit": PIT_NAMES, "reported": EVENT_NAMES}
OTHER_NAMES = tuple(name for names in OTHERS.values() for name in names)
GROUPS = {"contamination": 0.304, "by_cycle": 0.133, "draft": 0.152, "shared_noise": 0.05, "ids": 0.0475,
          "learned_tilt": 0.095, "pit": 0.057, "copies": 0.0855, "reported": 0.076}  # fmt: skip
FAMILY: Mapping[str, tuple[str, float]] = {
    name: (group, GROUPS[group] / len(names)) for group, names in {**BETS, **OTHERS}.items() for name in names
}
"""Direction -> its group and weight. One that a run cannot test keeps its weight: it counts as e = 1."""
assert sum(weight for _, weight in FAMILY.values()) <= 1 + 1e-9

CYCLES, DRAFTS = "places in the decoding cycle are not known", "the draft's distribution is not known"
WHY: Mapping[str, str] = {
    **dict.fromkeys((*DRAFT, *SHARED_NOISE), DRAFTS),
    **dict.fromkeys(EVENT_NAMES, "no log-probs are reported, or it is not known what they should be"),
    **dict.fromkeys(("stop", "no_stop"), "no token ends a completion"),
    **dict.fromkeys(("seen", "unseen"), "the prompts are not known"),
    **dict.fromkeys(("shared_uniform", "repeated_uniform"), "no neighbouring tokens"),
    "row_before": "the rows before are not known",
    "neighbour": "rows have columns of their own",
    "bigram": "nothing had been learned yet",
    "unprocessed": "the claim is the raw softmax",
    "copies": "no two completions had the same context",
}
"""Direction -> why no cohort allowed it."""


def split(name: str, masks: Array) -> tuple[list[str], Array]:
    """Return a direction and its bets by place in the cycle: names and masks [names, n]."""
    places = PLACES if name in BY_PLACE else 1 if name in DRAFT + SHARED_NOISE else 0
    return [name, *(f"{name}@{place}" for place in range(places))], masks[: 1 + places]


def why_not(name: str, tested: Container[str]) -> str:
    """Return why a direction was not tested, given the tested ones."""
    base, at_place, _ = name.partition("@")
    if at_place and (base in tested or base not in WHY):
        return CYCLES
    if base == "draft_no_stop" and "draft" in tested:
        return WHY["no_stop"]
    return WHY.get(base, "there were no tokens")


# ---- a cohort as bets need it


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """N positions with neighbours and uniforms; ``upper``, ``own`` and ``ranked`` are filled chunk by chunk."""

    block: Block
    places: Index  # [N, 2] request, position
    masks: Array  # [1 + PLACES, N] all positions, and those of each place in the decoding cycle
    serial: Index  # [N] the position before in the same completion, -1: there is none
    rows: Index  # [N] the same position of the request before, -1: there is none
    upper: Array  # [N] F(x) in the order of ids
    own: Array  # [N] p(x)
    ranked: Array  # [N] F(x-) in the order of likelihood

    def at(self, index: slice | Tensor, vocabulary: int, bigram: Bigram) -> Rows:
        """Return the selected positions, with the facts known before their tokens."""
        own = {name: getattr(self.block, name) for name in self.block.__slots__}
        cut: dict[str, Any] = {name: value[index] for name, value in own.items() if isinstance(value, Tensor)}
        part = replace(self.block, **cut)
        neighbour = None
        if part.ids is None:
            itself = torch.arange(len(self.rows), device=part.probs.device)
            partner = torch.from_numpy(self.rows).to(itself.device)
            neighbour = self.block.probs[torch.where(partner >= 0, partner, itself)[index]]
        return Rows(part=part, vocabulary=vocabulary, neighbour=neighbour, bigram=bigram.table(part))

    def fill(self, rows: Rows, cells: Tensor, start: int) -> Tensor:
        """Store p(x), F(x) and F(x-) of positions from ``start`` on; return F of all of their columns [n, M]."""
        stop = start + len(rows.p)
        own, upper = rows.p.gather(1, cells[:, None])[:, 0], (rows.middle() + rows.p) / 2
        self.own[start:stop] = own.cpu().numpy()
        self.upper[start:stop] = upper.gather(1, cells[:, None])[:, 0].cpu().numpy()
        self.ranked[start:stop] = likelier(rows.p, cells, own).cpu().numpy()
        return upper


def make_cohort(block: Block) -> Cohort:
    """Return the cohort of a block whose requests are in order."""
    request, position = block.request.cpu().numpy(), block.position.cpu().numpy()
    span = int(position.max()) + 2
    key = np.cumsum(np.diff(request, prepend=request[0]) != 0) * span + position  # sorted, for requests are in order
    cycle = np.full(len(block), -1) if block.cycle is None else block.cycle.cpu().numpy()
    place = np.minimum(cycle, PLACES - 1)
    return Cohort(
        block=block,
        places=np.stack([request, position], -1),
        masks=np.stack([np.ones(len(block)), *(place == at for at in range(PLACES))]).astype(np.float64),
        serial=_find(key, np.where(position > 0, key - 1, -1)),
        rows=_find(key, key - span),
        upper=np.zeros(len(block)),
        own=np.zeros(len(block)),
        ranked=np.zeros(len(block)),
    )


def _find(key: Index, wanted: Index) -> Index:
    """Return the index of each wanted key; -1 for a missing key."""
    at = np.searchsorted(key, wanted).clip(max=len(key) - 1)
    found: Index = np.where(key[at] == wanted, at, -1)
    return found


class _Ratios:
    """Payoffs of directions at N positions, filled chunk by chunk: r(x)/p(x), and total variation from the claim."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.found: dict[str, tuple[Array, Array]] = {}  # [N] each; a position that a direction lacks is no bet

    def note(self, name: str, start: int, ratio: Array, tv: Array) -> None:
        """Store the payoffs of positions from ``start`` on."""
        ratios, moved = self.found.setdefault(name, (np.ones(self.count), np.zeros(self.count)))
        ratios[start : start + len(ratio)], moved[start : start + len(tv)] = ratio, tv


# ---- the ledger


class Ledger:
    """Evidence against the claim, cohort after cohort."""

    def __init__(
        self,
        vocabulary: int,
        *,
        alpha: float = 1e-4,
        seed: int = 0,
        tolerance: float = 2e-3,
        allowed: float = 1e-4,
        enumerate_rows: bool = True,
    ) -> None:
        """Begin with no evidence.

        Args:
            vocabulary: V.
            alpha: probability of a false alarm.
            seed: seed of the ledger's own uniforms.
            tolerance: nats that a reported log-prob of an intact engine may be off, by its precision.
            allowed: share of tokens that may be off by more.
            enumerate_rows: enumerate all tokens of one row in 64. Without it ``visible`` returns nothing, and an update
                takes a third less time.
        """
        self.vocabulary, self.alpha, self.tolerance = vocabulary, alpha, tolerance
        self.tokens = 0
        self.highest = 0.0
        self.history: list[tuple[int, float]] = []
        self._seed, self._cohorts, self._request = seed, 0, -1
        self._bets = Bets([name for names in BETS.values() for name in names])
        self.bigram, self._ids, self._tilt = Bigram(vocabulary), Ids(vocabulary), Tilt()
        self._enumerate_rows = enumerate_rows
        self._pit, self._reported = Pit(), Reported(allowed)
        self._worst: dict[str, list[tuple[float, int, int]]] = {}
        self._tested: set[str] = set()

    # ---- in

    def update(self, block: Block) -> None:
        """Add the evidence of a whole cohort; requests come in the order of submission, also from call to call.

        Raises: ``ValueError`` for requests or positions out of order.
        """
        self._in_order(block)
        if not len(block):
            return
        cohort = make_cohort(block)
        step = max(1, ELEMENTS // block.probs.shape[1])
        made = _Ratios(len(block))
        gains = [self._chunk(cohort, made, i, min(i + step, len(block))) for i in range(0, len(block), step)]
        for name, (ratio, tv) in made.found.items():
            if name != "copies" or tv.any():
                self._bets.add(*split(name, cohort.masks), ratio, tv, cohort.places)
        self._keep("learned_tilt", np.concatenate(gains), cohort.places)
        self._whole(cohort)
        self.tokens += len(block)
        self._cohorts += 1
        log_e = self.log_e
        self.highest = max(self.highest, log_e)
        self.history.append((self.tokens, log_e))

    def _in_order(self, block: Block) -> None:
        request, position = block.request.cpu().numpy(), block.position.cpu().numpy()
        new = np.diff(request, prepend=self._request)
        same = np.flatnonzero(new == 0)
        late = (new < 0).any() or (len(new) and new[0] == 0)
        if late or (position[same] <= position[same - 1]).any():
            raise ValueError(
                "requests come whole and in the order of submission: one that ended first may not be looked at first"
            )
        self._request = int(request[-1]) if len(request) else self._request

    def _chunk(self, cohort: Cohort, made: "_Ratios", start: int, stop: int) -> Array:
        """Store the payoffs of the bets on some positions; return the gain of the learned tilt at each."""
        rows = cohort.at(slice(start, stop), self.vocabulary, self.bigram)
        cells = rows.part.cells
        upper = cohort.fill(rows, cells, start)
        floored = rows.p.gather(1, cells[:, None]).clamp_min(FLOOR)
        for name, direction in directions(rows):
            ratio = (direction.at(cells[:, None]) / floored)[:, 0]
            made.note(name, start, ratio.cpu().numpy(), direction.tv(rows.p).cpu().numpy())
        self._uniforms(cohort, made, slice(start, stop), upper, rows.p)
        gains = self._tilt.add(rows, cells)
        every = SAMPLE * max(1, self.vocabulary // COARSE) if rows.part.ids is None else SAMPLE
        few = np.arange(start + -start % every, stop, every)
        if self._enumerate_rows and len(few):
            self._enumerate(cohort, few)
        return gains

    def _enumerate(self, cohort: Cohort, few: NDArray[np.int64]) -> None:
        """Learn from all columns of a few positions how fast faults would show."""
        sample = cohort.at(torch.from_numpy(few), self.vocabulary, self.bigram)
        for name, direction in directions(sample):
            names, masks = split(name, cohort.masks[:, few])
            self._bets.learn(names, masks, direction, sample.p)

    def _uniforms(self, cohort: Cohort, made: "_Ratios", at: slice, upper: Tensor, p: Tensor) -> None:
        """Bet that tokens were drawn with the uniform of a neighbouring request, or of the token before."""
        for name, partner in (("shared_uniform", cohort.rows[at]), ("repeated_uniform", cohort.serial[at])):
            high, length = cohort.upper[partner], cohort.own[partner]
            there = (partner >= 0) & (length > CERTAIN)
            if not there.any():
                continue
            low, floored = high - length, np.maximum(cohort.own[at], FLOOR)
            safe = np.where(there, high, low + 1)
            r = overlap(cohort.upper[at], cohort.own[at], low, safe)
            known = torch.from_numpy(np.stack([low, safe], -1)).to(p.device)
            tv = Table(overlap(upper, p, known[:, :1], known[:, 1:])).tv(p).cpu().numpy() * there
            made.note(name, at.start, np.where(there, r / floored, 1.0), tv)

    def _whole(self, cohort: Cohort) -> None:
        """Place bets that need the whole cohort, and learn from it for the next."""
        block, places = cohort.block, cohort.places
        own = self.tie_breaks(len(block))
        ranked, by_id = cohort.ranked + own * cohort.own, cohort.upper - own * cohort.own
        for name, gain in self._pit.add(ranked, by_id, cohort.serial, cohort.rows).items():
            self._keep(name, gain, places)
        self._tilt.close()
        self._tested |= {"ids", "learned_tilt", *PIT_NAMES}
        if block.reported is not None and block.declared is not None:
            self._keep("reported", self._reported.add(block, tolerated(block, self.tolerance).cpu().numpy()), places)
            self._tested.update(EVENT_NAMES)
        tokens = block.tokens.cpu().numpy()
        log_p = np.maximum(block.logprobs.double().cpu().numpy(), math.log(FLOOR))
        self._ids.add(tokens, log_p, block.probs.sum(0).cpu().numpy() if block.ids is None else None)
        self._keep("ids", np.where(tokens == self._ids.leader()[0], -log_p, -np.inf), places)
        self.bigram.learn(block.last.cpu().numpy(), tokens)

    def tie_breaks(self, count: int) -> Array:
        """Return uniforms [N] that place each token's transform between F(x-) and F(x)."""
        return np.random.default_rng([self._seed, self._cohorts]).random(count)

    def _keep(self, name: str, gain: Array, places: NDArray[np.int64]) -> None:
        best = [i for i in np.argsort(-gain, kind="stable")[:WORST] if gain[i] > 0]
        new = [(float(gain[i]), int(places[i, 0]), int(places[i, 1])) for i in best]
        self._worst[name] = sorted(self._worst.get(name, []) + new, reverse=True)[:WORST]

    # ---- out

    @property
    def log_e(self) -> float:
        """Return ln of the merged e-value; a fault is proved at ln 1/alpha."""
        parts = self._parts()
        return float(log_sum_exp(np.asarray([parts[name] + math.log(weight) for name, (_, weight) in FAMILY.items()])))

    def _parts(self) -> dict[str, float]:
        """Return ln e of every direction."""
        found = dict(zip(self._bets.names, self._bets.log_es().tolist(), strict=True))
        found |= {"ids": self._ids.log_e, "learned_tilt": self._tilt.log_e}
        return found | self._pit.log_es() | self._reported.log_es()

    def evidence(self) -> list[Evidence]:
        """Return the evidence of every tested direction, the strongest first."""
        parts, found = self._parts(), []
        for name in [*self._bets.names, *OTHER_NAMES]:
            if name not in self._bets.tested | self._tested:
                continue
            group, weight = FAMILY[name]
            share, tv = self._bound(name)
            found.append(Evidence(name=name, group=group, log_e=parts[name], weight=weight, share=share, tv=tv))
        return sorted(found, key=lambda one: -one.merged)

    def _bound(self, name: str) -> tuple[float | None, float | None]:
        if name in self._bets.names:
            return self._bets.bound(name, self.tokens)
        if name == "ids":
            return self._ids.bound()
        return (self._reported.share(name), None) if name in EVENT_NAMES else (None, None)

    @property
    def reported_odds(self) -> float | None:
        """Return the mean of claimed over reported probability where these differ, see ``Reported.odds``."""
        return self._reported.odds

    def visible(self, limit_tv: float | None = None) -> list[Visible]:
        """Return, for every direction, the smallest share that the examined tokens show with probability 90 %.

        ``limit_tv``: total variation per token; ``Visible.needs`` is the number of tokens that show a fault of this
        size.
        """
        found = []
        for name in self._bets.names:
            if self._bets.enumerated(name):
                asked = (name, self.tokens, FAMILY[name][1], self.alpha)
                share, tv = self._bets.visible(*asked)
                needs = None if limit_tv is None else self._bets.needed(*asked, limit_tv)
                found.append(Visible(name=name, share=share, tv=tv, needs=needs))
        return found

    @property
    def untested(self) -> dict[str, str]:
        """Return the directions that no cohort could test, and why."""
        tested = self._bets.tested | self._tested
        return {name: why_not(name, tested) for name in FAMILY if name not in tested}

    def positions(self, count: int) -> list[tuple[int, int, float]]:
        """Return request, position and gain in ln e where the strongest direction gained most."""
        evidence = self.evidence()
        if not evidence:
            return []
        name = evidence[0].name
        if name in self._bets.names:
            return self._bets.worst(name)[:count]
        kept = self._worst.get("reported" if name in EVENT_NAMES else name, [])
        if name == "ids":
            share = self._ids.leader()[1]
            kept = [(math.log1p(share * (math.exp(gain) - 1)), request, at) for gain, request, at in kept]
        return [(request, at, gain) for gain, request, at in kept[:count]]

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint (tensors, numbers, texts, lists, dicts): a few MB for any vocabulary."""
        parts = {name: part.state_dict() for name, part in self._stateful().items()}
        own: dict[str, Any] = {
            "tokens": self.tokens,
            "highest": self.highest,
            "history": list(self.history),
            "cohorts": self._cohorts,
            "request": self._request,
            "worst": {name: list(kept) for name, kept in self._worst.items()},
            "tested": sorted(self._tested),
        }
        return _portable({**own, **parts})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint; raise ``ValueError`` if it has another vocabulary or family."""
        state = _arrays(state)
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        self.tokens, self._cohorts, self._request = int(state["tokens"]), int(state["cohorts"]), int(state["request"])
        self.highest, self._tested = float(state["highest"]), set(state["tested"])
        self.history = [(int(tokens), float(log_e)) for tokens, log_e in state["history"]]
        self._worst = {name: [tuple(one) for one in kept] for name, kept in state["worst"].items()}

    def _stateful(self) -> dict[str, Any]:
        return {"bets": self._bets, "bigram": self.bigram, "ids": self._ids, "tilt": self._tilt, "pit": self._pit,
                "reported": self._reported}  # fmt: skip


def _portable(value: Any) -> Any:
    """Return a value with arrays as tensors and tuples as lists, which ``torch.load(weights_only=True)`` can read."""
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    if isinstance(value, dict):
        return {name: _portable(inner) for name, inner in value.items()}
    return [_portable(inner) for inner in value] if isinstance(value, list | tuple) else value


def _arrays(value: Any) -> Any:
    """Return a value with tensors as fresh arrays: the inverse of ``_portable``."""
    if isinstance(value, torch.Tensor):
        return value.cpu().numpy().copy()
    if isinstance(value, dict):
        return {name: _arrays(inner) for name, inner in value.items()}
    return [_arrays(inner) for inner in value] if isinstance(value, list) else value
