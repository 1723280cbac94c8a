"""Measurements of one head of one seed on text of every temperature."""

from dataclasses import dataclass

import numpy as np

from bebop.adaptation.probe import Probe
from bebop.trainer.chains import TokenRow
from recipes.reproduce.study import DEPTH, HELD_OUT, QUICK, text
from recipes.reproduce.temperature.slopes import line

ARMS = ("start", "hard_ce", "ce", "tv", "e2e_tv", "nla", "rkl")
TEMPERATURES = (0.6, 1.0, 1.4) if QUICK else (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
DRAFTS = {"sampled": "overlap", "greedy": "target_only"}  # drafts -> their acceptance
AVERAGED = ("overlap", "target_only", "target_entropy", "alpha_p_gt_q", "alpha_q_ge_p")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """Results of one head: means at every temperature, and the whole probe at temperature 1."""

    means: dict[float, dict[str, float]]  # temperature -> overlap/1, ..., overlap (all positions), accept_length, ...
    plain: Probe  # at temperature 1

    def swept(self, name: str, over: str = "target_entropy") -> tuple[float, float]:
        """Return the slope of a mean on a mean entropy over the temperatures, and R squared."""
        return line([m[over] for m in self.means.values()], [m[name] for m in self.means.values()])


def sampled(seed: int, temperature: float) -> list[TokenRow]:
    """Return text sampled from the target at a temperature; other recipes probe on the text of temperature 1."""
    hot = [] if temperature == 1 else [f"data.sampling.temperature={temperature}"]
    return text(seed, HELD_OUT, *hot)


def means(probe: Probe) -> dict[str, float]:
    """Return means over tokens, at each position and over all positions."""
    means = {"accept_length": float(probe.accept.mean()), "accept_greedy": float(probe.accept_greedy.mean())}
    for name in AVERAGED:
        means[name] = float(np.nanmean(probe.numbers[name]))
        means |= {f"{name}/{k}": float(np.nanmean(probe.numbers[name][:, k - 1])) for k in range(1, DEPTH + 1)}
    return means
