"""Simulated seconds of cycles and updates, as functions of the job's sizes."""

from dataclasses import dataclass

import numpy as np

from bebop.config.simulate import CompletionsConfig, CostsConfig, SimulateConfig

GIGABYTE = 1e9


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of each operation; a simulated token stands for ``grain`` tokens."""

    config: CostsConfig
    drafts: int  # K
    grain: int = 1

    @classmethod
    def of(cls, config: SimulateConfig) -> "Costs":
        """Return the costs of a simulation."""
        return cls(config.costs, config.completions.draft_tokens, config.grain)

    def cycle(self, rows: int) -> float:
        """Return the seconds of a cycle: K draft steps, and a pass of the target over K + 1 positions of each row."""
        c, k = self.config, self.drafts
        if (measured := self._measured(rows)) is not None:
            return self.grain * measured
        target = c.cycle + c.row * (rows - 1) + c.position * k * rows
        return self.grain * (target + k * (c.draft + c.draft_row * (rows - 1)))

    def _measured(self, rows: int) -> float | None:
        """Interpolate between the measured batch sizes; beyond the largest, time grows in proportion."""
        known = sorted((n, seconds) for drafts, n, seconds in self.config.cycles if drafts == self.drafts)
        if not known:
            return None
        sizes, seconds = zip(*known, strict=True)
        return float(np.interp(rows, sizes, seconds)) * max(1.0, rows / sizes[-1])

    def update(self, tokens: float) -> float:
        """Return the seconds of an update on ``tokens`` simulated tokens, prompts included."""
        return self.config.update + self.config.update_token * tokens * self.grain

    @property
    def transfer(self) -> float:
        """Return the seconds to transfer the weights to a worker."""
        return self.config.weights / self.config.bandwidth


def emitted(answers: CompletionsConfig) -> tuple[float, float]:
    """Return mean and variance of the tokens emitted by a cycle: accepted drafts and one more."""
    reached = np.cumprod([1.0, *answers.accept_rates[: answers.draft_tokens]])  # [K + 1] P(at least k accepted)
    counts = np.arange(len(reached)) + 1
    chances = reached - np.append(reached[1:], 0.0)
    mean = float(chances @ counts)
    return mean, float(chances @ (counts - mean) ** 2)


def cycles(length: int, answers: CompletionsConfig, rng: np.random.Generator) -> int:
    """Draw the number of cycles of a completion of ``length`` tokens from the chances of accepted drafts."""
    if not answers.draft_tokens:
        return length
    rates = np.array(answers.accept_rates[: answers.draft_tokens])
    mean, _ = emitted(answers)
    done, total = 0, 0
    while total < length:
        block = max(8, int((length - total) / mean * 1.1) + 1)
        stands = np.cumprod(rng.random((block, len(rates))) < rates, axis=1).sum(axis=1) + 1
        sums = total + np.cumsum(stands)
        if sums[-1] >= length:
            return done + int(np.searchsorted(sums, length)) + 1
        done, total = done + block, int(sums[-1])
    return done
