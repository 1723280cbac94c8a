"""One head of one seed on text of every temperature: the jobs that run side by side, and what they give back."""

from dataclasses import dataclass

import numpy as np

from bebop.adaptation.probe import Probe, probe
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from recipes.reproduce.study import DEPTH, HELD_OUT, QUICK, SEEDS, Arm, corpus, head, policy, text
from recipes.reproduce.temperature.slopes import line

ARMS = ("start", "hard_ce", "ce", "tv", "e2e_tv", "nla", "rkl")
TEMPERATURES = (0.6, 1.0, 1.4) if QUICK else (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
RULES = {"sampled": "overlap", "greedy": "target_only"}  # drafts -> their acceptance
AVERAGED = ("overlap", "target_only", "target_entropy", "alpha_p_gt_q", "alpha_q_ge_p")

Key = tuple[str, int]  # arm, seed
Job = tuple[str, int, float | None]  # what, seed, temperature


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadResult:
    """What one head does: means at every temperature, and everything at temperature 1."""

    means: dict[float, dict[str, float]]  # temperature -> overlap/1, ..., overlap (all positions), accept_length, ...
    plain: Probe  # at temperature 1

    def swept(self, name: str, over: str = "target_entropy") -> tuple[float, float]:
        """Slope of a mean on a mean entropy over the temperatures, and R squared."""
        return line([m[over] for m in self.means.values()], [m[name] for m in self.means.values()])


def sampled(seed: int, temperature: float) -> list[TokenRow]:
    """Text of the target at a temperature; that of temperature 1 is what other recipes probe on."""
    hot = [] if temperature == 1 else [f"data.sampling.temperature={temperature}"]
    return text(seed, HELD_OUT, *hot)


def prepare(job: Job) -> None:
    """Sample what several heads need, once, so that no two processes do."""
    what, seed, temperature = job
    if what == "corpus":
        corpus(seed)
    else:
        assert temperature is not None
        sampled(seed, temperature)


def preparations() -> list[Job]:
    """The corpora of all seeds, then their texts."""
    texts: list[Job] = [("text", seed, t) for seed in SEEDS for t in TEMPERATURES]
    return [*(("corpus", seed, None) for seed in SEEDS), *texts]


def run(key: Key) -> HeadResult:
    """Train (or find) a head and probe it at every temperature."""
    name, seed = key
    model = policy() if name == "start" else head(Arm(objective=name, seed=seed))
    probes = {t: probe(model, sampled(seed, t), DEPTH, Sampling(temperature=t)) for t in TEMPERATURES}
    return HeadResult(means={t: means(p) for t, p in probes.items()}, plain=probes[1.0])


def means(probe: Probe) -> dict[str, float]:
    """Means over tokens, at each position and over all of them."""
    means = {"accept_length": float(probe.accept.mean()), "accept_greedy": float(probe.accept_greedy.mean())}
    for name in AVERAGED:
        means[name] = float(np.nanmean(probe.numbers[name]))
        means |= {f"{name}/{k}": float(np.nanmean(probe.numbers[name][:, k - 1])) for k in range(1, DEPTH + 1)}
    return means
