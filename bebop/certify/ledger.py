"""The black box: do sampled tokens follow the claimed distribution, and if not, in which direction are they off?

A betting martingale for every direction, merged by fixed weights. Cohorts come whole and in the order of submission:
bets on a token look at what came before it in its own answer and in earlier requests, and learn from earlier cohorts
alone. Which answers end first decides nothing.
"""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.bets import SAMPLE, WORST, Bets
from bebop.certify.bigram import Bigram
from bebop.certify.checkpoint import arrays, portable
from bebop.certify.cohort import Cohort, make_cohort
from bebop.certify.directions import FLOOR, Table, directions
from bebop.certify.evidence import Array, Evidence, Visible, log_sum_exp
from bebop.certify.family import BETS, EVENT_NAMES, FAMILY, OTHER_NAMES, PIT_NAMES, split, why_not
from bebop.certify.marginals import Ids, Pit, Reported, overlap
from bebop.certify.tilt import Tilt

ELEMENTS = 1 << 21  # of a table that are looked at together; a dozen such tables are alive at a time
CERTAIN = 1e-6  # a token that is less likely tells too little of its uniform to compare another with it


class Ledger:
    """Evidence against the claim, cohort after cohort; R parallel runs for simulation."""

    def __init__(
        self,
        vocabulary: int,
        *,
        alpha: float = 1e-4,
        runs: int = 1,
        seed: int = 0,
        tolerance: float = 2e-3,
        allowed: float = 1e-4,
        enumerate_rows: bool = True,
    ) -> None:
        """``tolerance``: nats that a reported log-prob of an intact engine may be off, by its precision; ``allowed``:
        share of tokens that may be off by more; ``seed``: of the ledger's own uniforms; ``enumerate_rows``: look at
        all tokens of one row in 64, without which ``visible`` knows nothing and an update takes a third less time."""
        self.vocabulary, self.alpha, self.runs, self.tolerance = vocabulary, alpha, runs, tolerance
        self.tokens = 0
        self.highest = np.zeros(runs)
        self.history: list[tuple[int, float]] = []
        self._seed, self._cohorts, self._request = seed, 0, -1
        self._bets = Bets([name for names in BETS.values() for name in names], runs)
        self._bigram, self._ids, self._tilt = Bigram(vocabulary), Ids(vocabulary, runs), Tilt(runs)
        self._enumerate_rows = enumerate_rows
        self._pit, self._reported = Pit(runs), Reported(allowed)
        self._worst: dict[str, list[tuple[float, int, int]]] = {}
        self._tested: set[str] = set()

    # ---- in

    def update(self, block: Block, tokens: Tensor | None = None) -> None:
        """Take in a whole cohort; requests come in the order of submission, also from call to call.

        ``tokens`` [R, N], for simulation: columns that parallel runs draw in place of the block's own. What is learned
        of bigrams then comes from run 0, which is nobody's future, and reported log-probs are left out.

        Raises: ``ValueError`` for requests or positions out of order, or a wrong number of runs.
        """
        self._in_order(block)
        if (1 if tokens is None else len(tokens)) != self.runs:
            raise ValueError(f"{self.runs} parallel runs need tokens of [{self.runs}, N]")
        if not len(block):
            return
        cohort = make_cohort(block, block.cells[None] if tokens is None else tokens)
        step = max(1, ELEMENTS // block.probs.shape[1])
        gains = [self._chunk(cohort, i, min(i + step, len(block))) for i in range(0, len(block), step)]
        self._keep("learned_tilt", np.concatenate(gains), cohort.places)
        self._whole(cohort, simulated=tokens is not None)
        self.tokens += len(block)
        self._cohorts += 1
        self.highest = np.maximum(self.highest, self.log_es)
        self.history.append((self.tokens, self.log_e))

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

    def _chunk(self, cohort: Cohort, start: int, stop: int) -> Array:
        """Bet on positions; what each gave to the learned tilt."""
        rows = cohort.at(slice(start, stop), self.vocabulary, self._bigram)
        cells, masks, places = cohort.cells[start:stop], cohort.masks[:, start:stop], cohort.places[start:stop]
        upper = cohort.fill(rows, start)
        few = np.arange(0, stop - start, SAMPLE)
        sample = cohort.at(torch.from_numpy(start + few), self.vocabulary, self._bigram)
        enumerated = dict(directions(sample)) if self._enumerate_rows else {}
        floored = rows.p.gather(1, cells).clamp_min(FLOOR)
        for name, direction in directions(rows):
            names, own = split(name, masks)
            ratio, tv = (direction.at(cells) / floored).T.cpu().numpy(), direction.tv(rows.p).cpu().numpy()
            if name != "copies" or tv.any():
                self._bets.add(names, own, ratio, tv, places)
                if name in enumerated:
                    self._bets.learn(names, own[:, few], enumerated[name], sample.p)
        self._uniforms(cohort, slice(start, stop), upper, rows.p)
        return self._tilt.add(rows, cells)

    def _uniforms(self, cohort: Cohort, at: slice, upper: Tensor, p: Tensor) -> None:
        """Bet that tokens were drawn with the uniform of a neighbouring request, or of the token before."""
        for name, partner in (("shared_uniform", cohort.rows[at]), ("repeated_uniform", cohort.serial[at])):
            high, length = cohort.upper[:, partner], cohort.own[:, partner]
            there = (partner >= 0) & (length > CERTAIN)  # [R, n]
            if not there.any():
                continue
            low, floored = high - length, np.maximum(cohort.own[:, at], FLOOR)
            safe = np.where(there, high, low + 1)
            r = overlap(cohort.upper[:, at], cohort.own[:, at], low, safe)
            known = torch.from_numpy(np.stack([low[0], safe[0]], -1)).to(p.device)
            tv = Table(overlap(upper, p, known[:, :1], known[:, 1:])).tv(p).cpu().numpy() * there[0]
            mask = np.ones((1, len(partner)))
            self._bets.add([name], mask, np.where(there, r / floored, 1.0), tv, cohort.places[at])

    def _whole(self, cohort: Cohort, simulated: bool) -> None:
        """Bets that need the whole cohort, and what is learned for the next."""
        block = cohort.block
        own = np.random.default_rng([self._seed, self._cohorts]).random(cohort.own.shape)
        ranked, by_id = cohort.ranked + own * cohort.own, cohort.upper - own * cohort.own
        for name, gain in self._pit.add(ranked, by_id, cohort.serial, cohort.rows).items():
            self._keep(name, gain, cohort.places)
        self._tested.update(PIT_NAMES)
        self._tilt.close()
        self._tested.add("learned_tilt")
        if block.reported is not None and block.declared is not None and not simulated:
            self._keep("reported", self._reported.add(block, self.tolerance), cohort.places)
            self._tested.update(EVENT_NAMES)
        if simulated and block.ids is not None:
            return
        tokens = cohort.cells.T.cpu().numpy() if simulated else block.tokens[None].cpu().numpy()
        log_p = np.log(np.maximum(cohort.own, FLOOR))
        if not simulated:
            log_p = np.maximum(block.logprobs[None].double().cpu().numpy(), math.log(FLOOR))
        self._ids.add(tokens, log_p, block.probs.sum(0).cpu().numpy() if block.ids is None else None)
        self._tested.add("ids")
        leader = tokens[0] == self._ids.leader()[0]
        self._keep("ids", np.where(leader, -log_p[0], -np.inf), cohort.places)
        self._bigram.learn(block.last.cpu().numpy(), tokens[0])

    def _keep(self, name: str, gain: Array, places: NDArray[np.int64]) -> None:
        best = [i for i in np.argsort(-gain, kind="stable")[:WORST] if gain[i] > 0]
        new = [(float(gain[i]), int(places[i, 0]), int(places[i, 1])) for i in best]
        self._worst[name] = sorted(self._worst.get(name, []) + new, reverse=True)[:WORST]

    # ---- out

    @property
    def log_es(self) -> Array:
        """ln of the merged e-value of every run, [R]."""
        parts = self._parts()
        return log_sum_exp(np.stack([parts[name] + math.log(weight) for name, (_, weight) in FAMILY.items()]), 0)

    @property
    def log_e(self) -> float:
        """ln of the merged e-value of run 0; a fault is proved at ln 1/alpha."""
        return float(self.log_es[0])

    def _parts(self) -> dict[str, Array]:
        """ln e of every direction, [R]."""
        found = dict(zip(self._bets.names, self._bets.log_es(), strict=True))
        found |= {"ids": self._ids.log_es(), "learned_tilt": self._tilt.log_es(), **self._pit.log_es()}
        return found | {name: np.full(self.runs, log_e) for name, log_e in self._reported.log_es().items()}

    def evidence(self, run: int = 0) -> list[Evidence]:
        """Of every direction that was tested, the strongest first."""
        parts, found = self._parts(), []
        for name in [*self._bets.names, *OTHER_NAMES]:
            if name not in self._bets.tested | self._tested:
                continue
            group, weight = FAMILY[name]
            share, tv = self._bound(name, run)
            found.append(
                Evidence(name=name, group=group, log_e=float(parts[name][run]), weight=weight, share=share, tv=tv)
            )
        return sorted(found, key=lambda one: -one.merged)

    def _bound(self, name: str, run: int) -> tuple[float | None, float | None]:
        if name in self._bets.names:
            return self._bets.bound(name, self.tokens, run)
        if name == "ids":
            return self._ids.bound(run)
        return (self._reported.share(name), None) if name in EVENT_NAMES else (None, None)

    def visible(self) -> list[Visible]:
        """For every direction the smallest share that so many tokens show with 90 %, by ``evidence.visible_share``."""
        found = []
        for name in self._bets.names:
            if self._bets.enumerated(name):
                share, tv = self._bets.visible(name, self.tokens, FAMILY[name][1], self.alpha)
                found.append(Visible(name=name, share=share, tv=tv))
        return found

    @property
    def untested(self) -> dict[str, str]:
        """Directions that no cohort could test, and why."""
        tested = self._bets.tested | self._tested
        return {name: why_not(name, tested) for name in FAMILY if name not in tested}

    def positions(self, count: int) -> list[tuple[int, int, float]]:
        """Request, position and what it gave in ln e, where the strongest direction of run 0 gained most."""
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
        """What a checkpoint keeps, as tensors, numbers, texts, lists and dicts: a few MB, whatever the vocabulary."""
        parts = {name: part.state_dict() for name, part in self._stateful().items()}
        own: dict[str, Any] = {
            "tokens": self.tokens,
            "highest": self.highest.copy(),
            "history": list(self.history),
            "cohorts": self._cohorts,
            "request": self._request,
            "worst": {name: list(kept) for name, kept in self._worst.items()},
            "tested": sorted(self._tested),
        }
        return portable({**own, **parts})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written; ``ValueError`` if it is of another vocabulary, run count or family."""
        state = arrays(state)
        for name, part in self._stateful().items():
            part.load_state_dict(state[name])
        self.tokens, self._cohorts, self._request = int(state["tokens"]), int(state["cohorts"]), int(state["request"])
        self.highest, self._tested = np.array(state["highest"]), set(state["tested"])
        self.history = [(int(tokens), float(log_e)) for tokens, log_e in state["history"]]
        self._worst = {name: [tuple(one) for one in kept] for name, kept in state["worst"].items()}

    def _stateful(self) -> dict[str, Any]:
        return {"bets": self._bets, "bigram": self._bigram, "ids": self._ids, "tilt": self._tilt, "pit": self._pit,
                "reported": self._reported}  # fmt: skip
