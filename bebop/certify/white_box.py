"""The white box: evidence from within verification, with separate tests of its three draws.

Rejection sampling is exact if (1) every draft y is drawn from the q that is recorded for it, (2) it is accepted with
probability min(1, p(y) / q(y)), and (3) the token that follows is drawn from norm(max(0, p - q)) after a rejection, and
from the row behind the last draft where all were accepted. With drafts, q, p and the outcome of a cycle one can bet
against each of these. A fault that hardly changes the completions may stand out in one of them. A fourth group of bets
is on (4) independence: given the draft, its test and the token after it are independent of the noise that drew it.

Every bet is placed before its draw, with e = r/p of an alternative r against the correct p, so the merged evidence is
an e-process: it ever reaches 1/alpha with probability at most alpha (Ville).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.evidence import BOUND_ALPHA, Evidence, log_mean_exp, log_sum_exp
from bebop.certify.noise import accepted_by_own_uniform, same_gumbel, same_uniform

# Weights of the draws. Faults of acceptance are the faintest: one coin tells less than one token.
GROUPS = {"draft_draw": 0.19, "acceptance": 0.38, "recovered": 0.19, "bonus": 0.19, "shared_noise": 0.05}
SHARES = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 0.9])  # shares of draws that come from the alternative
SIZES = np.array([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4])  # error of the acceptance probability
FLOOR = 1e-12  # least probability: an e-value only becomes smaller by it
MASS = 1e-5  # least mass of a residual that is not just rounding
PIECE = 1 << 19  # elements of p in one chunk: its intermediate tables should stay in the cache

TREE = "draws of a tree", "siblings are judged against what earlier ones left over"  # what is skipped, and why

COUNTS = ("cycles", "tokens", "drafts", "skipped", "highest", "found")


@dataclass(slots=True)
class _Bets:
    """Bets on one direction, one for each share [S]: ln of its e-value, and the total variation that it stands for."""

    log_e: NDArray[np.float64]
    distance: NDArray[np.float64]


class WhiteBox:
    """Evidence on each draw of verification; ``evidence`` tells which draw is wrong, and in which direction."""

    def __init__(self, alpha: float = 1e-4) -> None:
        self.alpha = alpha
        self.bets: dict[tuple[str, str], _Bets] = {}  # by group and direction
        self.cycles = self.tokens = 0  # tested cycles; accepted drafts and the tokens after them
        self.drafts = 0  # drafts whose draws were tested
        self.untested: dict[str, str] = {}  # parts that could not be tested, and why
        self.skipped = 0  # cycles without any test
        self.highest = 0.0  # the largest ln E so far
        self.found: int | None = None  # tokens that had been tested when it reached ln 1/alpha

    @torch.no_grad()
    def update(
        self,
        tokens: Tensor,
        q: Tensor | None,
        p: Tensor,
        accepted: Tensor,
        following: Tensor,
        lengths: Tensor | None = None,
        stops: Sequence[int] = (),
        stepwise: bool = True,
        one_hot: bool = False,
        reached_only: bool = False,
    ) -> None:
        """Add one cycle of B rows with chains of drafts.

        Args:
            tokens: [B, K] drafts; K may be 0.
            q: [B, K, V] recorded distribution of each draft. None: they were not sampled (one-hot).
            p: [B, K + 1, V] the target's processed distribution after the first j drafts.
            accepted: [B] number of accepted drafts.
            following: [B] the recovered or bonus token; -1: the completion ended with an accepted draft.
            lengths: [B] drafts that count; None: all K.
            stops: tokens that end a completion.
            stepwise: whether drafts are judged one by one. Otherwise (block verification) only their draws and the
                bonus token can be tested.
            one_hot: whether sampled drafts are judged as if they had not been sampled: accepted with p(y), and after a
                rejection followed by a token of p other than y. That is exact, too. So is accepting a draft that equals
                a draw of the target.
            reached_only: test the draws of only those drafts that verification reached. Set it for engines that key
                noise by position: there a draft behind a rejection and one of the next cycle have the same noise. Do
                not set it where drafts are judged as a whole, because then all of them decide which are reached.
        """
        if not stepwise:
            self.untested["acceptance, recovered"] = "the rule judges the drafts of a cycle as a whole"
        if q is None and tokens.shape[1]:
            self.untested["draft_draw"] = "drafts are not sampled"
        step = max(1, PIECE // p[0].numel())
        for start in range(0, len(p), step):
            part = slice(start, start + step)
            self._update(
                tokens[part],
                None if q is None else q[part],
                p[part].double(),
                accepted[part],
                following[part],
                torch.full_like(accepted[part], tokens.shape[1]) if lengths is None else lengths[part],
                stops,
                stepwise,
                one_hot,
                reached_only,
            )
        self.cycles += len(p)
        self.tokens += int(accepted.sum() + (following >= 0).sum())
        self.highest = max(self.highest, value := self.log_e)
        if self.found is None and value >= math.log(1 / self.alpha):
            self.found = self.tokens

    def skip(self, rows: int, what: str, why: str) -> None:
        """Count rows of a cycle that cannot be tested, and remember why."""
        self.skipped += rows
        self.untested[what] = why

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state in JSON types, for a checkpoint or another process."""
        bets = {f"{group}/{name}": [b.log_e.tolist(), b.distance.tolist()] for (group, name), b in self.bets.items()}
        return {"bets": bets, "untested": dict(self.untested), **{name: getattr(self, name) for name in COUNTS}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another white box with the same alpha."""
        for key, (log_e, distance) in state["bets"].items():
            group, _, name = key.partition("/")
            self.bets[group, name] = _Bets(np.array(log_e), np.array(distance))
        self.untested = dict(state["untested"])
        for name in COUNTS:
            setattr(self, name, state[name])

    @property
    def log_e(self) -> float:
        """Return ln of the merged e-value: a weighted sum over groups, and in each a mean over directions and shares.

        A group that has not been tested counts as 1.
        """
        parts = np.array([self._group(group) + math.log(weight) for group, weight in GROUPS.items()])
        return float(log_sum_exp(parts))

    def evidence(self) -> list[Evidence]:
        """Return the evidence of each direction, the strongest first."""
        found = []
        for (group, name), bets in self.bets.items():
            size = sum(other == group for other, _ in self.bets)
            share, tv = self._bound(bets, SIZES if group == "acceptance" else SHARES)
            weight = GROUPS[group] / size
            found.append(
                Evidence(
                    name=name, group=group, log_e=float(log_mean_exp(bets.log_e)), weight=weight, share=share, tv=tv
                )
            )
        return sorted(found, key=lambda one: -one.merged)

    def _group(self, group: str) -> float:
        parts = [log_mean_exp(bets.log_e) for (other, _), bets in self.bets.items() if other == group]
        return float(log_mean_exp(np.array(parts))) if parts else 0.0

    def _bound(self, bets: _Bets, shares: NDArray[np.float64]) -> tuple[float | None, float | None]:
        """Return the smallest share that the data excludes with all larger ones (a 95 % bound), and its variation.

        The variation is the total variation per token. Both are None if no share is excluded. If a share were true, the
        mixture over shares divided by its own e-value would be an e-value against it.
        """
        excluded = log_mean_exp(bets.log_e) - bets.log_e >= math.log(1 / BOUND_ALPHA)
        alive = np.flatnonzero(~excluded)
        first = alive[-1] + 1 if len(alive) else 0
        if first == len(shares):
            return None, None
        return float(shares[first]), float(bets.distance[first]) / max(1, self.tokens)

    # ---- the draws of some rows

    def _update(
        self,
        tokens: Tensor,
        sampled: Tensor | None,
        p: Tensor,
        accepted: Tensor,
        following: Tensor,
        lengths: Tensor,
        stops: Sequence[int],
        stepwise: bool,
        one_hot: bool,
        reached_only: bool,
    ) -> None:
        rows, drafts = torch.arange(len(p), device=p.device), tokens.shape[1]
        if drafts == 0:
            self._bonus(p[:, 0], p[:, 0], p[:, 0], following, torch.full_like(following[:, None], -1))
            return
        steps = torch.arange(drafts, device=p.device)
        q = torch.zeros_like(p[:, 1:]).scatter_(-1, tokens[..., None], 1.0) if sampled is None or one_hot else None
        drawn = q if sampled is None else sampled.double()
        q = drawn if q is None else q  # the distribution in the acceptance test
        assert drawn is not None and q is not None
        tested = (steps <= accepted[:, None]) & (steps < lengths[:, None])
        if sampled is not None:  # whether a draft is made does not depend on its token: all that count are draws from q
            made = tested if reached_only else steps < lengths[:, None]
            self.drafts += int(made.sum())
            self._drafts(drawn[made], p[:, :drafts][made], tokens[made], stops)
        rejected = accepted < lengths
        if stepwise:
            stands = (steps < accepted[:, None])[tested]
            self._coins(_at(p[:, :drafts], tokens)[tested], _at(q, tokens)[tested], stands)
            at = accepted.clamp(max=drafts - 1)
            before = torch.where((at > 0)[:, None], q[rows, (at - 1).clamp(min=0)], q[rows, at])
            own = [p[rows, at], q[rows, at], before, tokens[rows, at], following]
            self._recovered(*(part[rejected] for part in own))
            if sampled is not None:
                self._own_uniform(p[:, :drafts][tested], drawn[tested], q[tested], tokens[tested], stands)
                noise = [p[rows, at], drawn[rows, at], q[rows, at], tokens[rows, at], following]
                self._same_noise(*(part[rejected] for part in noise))
        full = rows[~rejected & (following >= 0)]
        end = lengths[full]
        some = (end > 0)[:, None]
        last = (end - 1).clamp(min=0)
        bonus = p[full, end]
        self._bonus(
            bonus,
            torch.where(some, p[full, last], bonus),
            torch.where(some, q[full, last], bonus),
            following[full],
            torch.where(some, tokens[full, last, None], -1),
        )

    def _drafts(self, q: Tensor, p: Tensor, y: Tensor, stops: Sequence[int]) -> None:
        """Bet on drafts y [n] against q [n, V]; p [n, V] is the target's distribution at their places."""
        rank, log = 2 * q.cumsum(-1) - q, q.log()
        going_on = q.clone()
        going_on[:, list(stops)] = 0
        others = {
            "hotter": _unit((log * 0.9).exp_(), q),
            "colder": _unit((log * 1.1).exp_(), q),
            "argmax": _one_hot(q.argmax(-1), q),
            "no_stop": _unit(going_on, q),
            "uniform": _equal(q),
            "high_ids": q * rank,
            "low_ids": q * (2 - rank),
            "target": p,
        }
        self._draws("draft_draw", q, others, y)

    def _coins(self, p: Tensor, q: Tensor, stands: Tensor) -> None:
        """Bet on outcomes [n] of tests with min(1, p/q), where p and q [n] are those of the drafted token."""
        a = (p / q.clamp_min(FLOOR)).clamp(max=1)[:, None]
        size = torch.as_tensor(SIZES, device=p.device)
        others = {
            "lenient": a * (1 + size),
            "strict": a * (1 - size),
            "power_lenient": a ** (1 - size),
            "power_strict": a ** (1 + size),
            "always": size + (1 - size) * a,
            "or_matched": a + (1 - a) * p[:, None] * size / SIZES[-1],  # also stands if a draw of p comes out the same
            "likely_taken": torch.where(p[:, None] > 0.5, size + (1 - size) * a, a),
            "unlikely_dropped": torch.where(q[:, None] < 0.1, (1 - size) * a, a),
        }
        for name, other in others.items():
            b = torch.minimum(other, 1 - 1e-6 * (1 - a))  # no single coin may end a bet
            e = torch.where(stands[:, None], b / a.clamp_min(FLOOR), (1 - b) / (1 - a).clamp_min(1e-9))
            self._add("acceptance", name, e.clamp_min(1e-300).log().sum(0), (b - a).abs().sum(0))

    def _recovered(self, p: Tensor, q: Tensor, before: Tensor, y: Tensor, x: Tensor) -> None:
        """Bet on tokens x [n] after a rejection of y [n]; ``before`` [n, V] is q of the draft before."""
        mass = (p - q).clamp_min(0).sum(-1)
        real = mass > MASS  # else p = q up to rounding, and there are no rejections
        p, q, before, y, x = p[real], q[real], before[real], y[real], x[real]
        left = _unit((p - q).clamp_min(0), p)
        cdf = left.cumsum(-1)
        rank = 2 * cdf - left
        chance = (_at(p, y) / _at(q, y).clamp_min(FLOOR)).clamp(max=1)[:, None]  # the test's u lay above it
        others = {
            "target": p,
            "draft": q,
            "row_off": _unit((p - before).clamp_min(0), left),
            "reused_uniform": _unit((cdf - torch.maximum(cdf - left, chance)).clamp_min(0), left),
            "uniform": _equal(p),
            "high_ids": left * rank,
            "low_ids": left * (2 - rank),
            "hotter": _unit(left.log().mul_(0.8).exp_(), left),
        }
        self._draws("recovered", left, others, x)

    def _own_uniform(self, p: Tensor, drawn: Tensor, q: Tensor, y: Tensor, stands: Tensor) -> None:
        """Bet that tests [n] of drafts y use the uniform that drew y from ``drawn`` [n, V]."""
        own, shares = _at(drawn, y), torch.as_tensor(SHARES, device=p.device)
        ratio, before = _at(p, y) / _at(q, y).clamp_min(FLOOR), _at(drawn.cumsum(-1), y) - own
        a, b = ratio.clamp(max=1), accepted_by_own_uniform(ratio * own, own, before)
        e = torch.where(stands, b / a.clamp_min(FLOOR), (1 - b) / (1 - a).clamp_min(1e-9))
        log_e = torch.log1p((e - 1)[:, None] * shares).sum(0)
        self._add("shared_noise", "accept_draft_uniform", log_e, (b - a).abs().sum() * shares)

    def _same_noise(self, p: Tensor, drawn: Tensor, q: Tensor, y: Tensor, x: Tensor) -> None:
        """Bet that tokens x [n] after a rejection of y [n] use the noise that drew y from ``drawn`` [n, V]."""
        real = (p - q).clamp_min(0).sum(-1) > MASS
        drawn, y, x, left = drawn[real], y[real], x[real], _unit((p[real] - q[real]).clamp_min(0), p[real])
        others = {
            "residual_draft_gumbel": same_gumbel(drawn, left),
            "residual_draft_uniform": same_uniform(drawn, left, y),
        }
        self._draws("shared_noise", left, others, x)

    def _bonus(self, p: Tensor, before: Tensor, q: Tensor, x: Tensor, y: Tensor) -> None:
        """Bet on tokens x [n] after all drafts of a row; ``before`` and ``q`` [n, V] are p and q of the last draft.

        That draft is y [n, 1], -1 where there was none.
        """
        log = p.log()
        others = {
            "no_repeat": torch.where(y < 0, p, _unit(p.scatter(1, y.clamp(min=0), 0.0), p)),
            "row_before": before,
            "draft": q,
            "uniform": _equal(p),
            "hotter": _unit((log * 0.8).exp_(), p),
            "colder": _unit((log * 1.25).exp_(), p),
        }
        self._draws("bonus", p, others, x)

    def _draws(self, group: str, base: Tensor, others: dict[str, Tensor], x: Tensor) -> None:
        """Bet that x [n] come from a mixture of ``base`` [n, V] and one of ``others``."""
        at, shares = _at(base, x).clamp_min(FLOOR), torch.as_tensor(SHARES, device=base.device)
        for name, other in others.items():
            gain = _at(other, x) / at - 1
            distance = (other - base).abs_().sum() / 2
            self._add(group, name, torch.log1p(gain[:, None] * shares).sum(0), distance * shares)

    def _add(self, group: str, name: str, log_e: Tensor, distance: Tensor) -> None:
        gained, moved = log_e.cpu().numpy(), distance.cpu().numpy()
        bets = self.bets.setdefault((group, name), _Bets(np.zeros_like(gained), np.zeros_like(moved)))
        bets.log_e += gained
        bets.distance += moved


def _at(probs: Tensor, tokens: Tensor) -> Tensor:
    """Return the probabilities [...] of tokens [...] under distributions [..., V]."""
    return probs.gather(-1, tokens[..., None])[..., 0]


def _one_hot(tokens: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).scatter_(-1, tokens[..., None], 1.0)


def _unit(weights: Tensor, otherwise: Tensor) -> Tensor:
    """Return normalised rows [n, V]; ``otherwise`` where there is no mass."""
    total = weights.sum(-1, keepdim=True)
    if bool((total > 1e-9).all()):  # nearly always; torch.where takes longer than the rest
        return weights / total
    return torch.where(total > 1e-9, weights / total.clamp_min(1e-300), otherwise)


def _equal(like: Tensor) -> Tensor:
    """Return the same mass on all tokens [n, V]."""
    return like.new_full((1, 1), 1 / like.shape[-1]).expand_as(like)
