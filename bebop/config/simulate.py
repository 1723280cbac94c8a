"""Define the settings of a simulation: the dataclasses behind ``conf/simulate.yaml``."""

from dataclasses import dataclass
from typing import Literal

from bebop.config.fields import (
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    Settings,
    above,
    at_least,
    section,
    setting,
    within,
)
from bebop.config.job import SEED

CYCLES = Limit(
    lambda cycles: all(drafts >= 0 and rows >= 1 and seconds > 0 for drafts, rows, seconds in cycles),
    "give [drafts, rows, seconds] from 0, from 1 and above 0",
)
RATES = Limit(lambda rates: all(0 <= rate <= 1 for rate in rates), "give numbers from 0 to 1, one a draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig(Settings):
    """How many of what: as ``rollout.*`` and ``trainer.*`` of a job."""

    SECTION = "fleet."
    workers: int = setting(2, "rollout workers", within(1, 1 << 16))
    slots: int = setting(64, "requests decoded side by side by one worker", POSITIVE)
    staleness: int = setting(1, "updates that a prompt's weights may lag behind", at_least(0, "synchronous"))
    dispatch: Literal["auto", "static", "pull"] = setting("auto", "as rollout.dispatch of a job")
    groups_per_step: int = setting(16, "prompts in one update", within(1, 1 << 20))
    group_size: int = setting(8, "G, completions per prompt", within(2, 1 << 16))
    steps: int = setting(30, "updates", POSITIVE)
    skip: int = setting(3, "first updates that are left out of the numbers", NOT_NEGATIVE)
    gpus_per_worker: int = setting(1, "GPUs of one rollout worker, for the best split", POSITIVE)
    trainer_gpus: int = setting(1, "GPUs of the trainer, for the best split", POSITIVE)

    def _validate(self) -> None:
        self.require(self.skip < self.steps, "skip", "it must be less than fleet.steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionsConfig(Settings):
    """Lengths of completions, a log-normal with a long tail, and what drafts of them are accepted."""

    SECTION = "completions."
    median: float = setting(90.0, "tokens of a completion", above(0))
    sigma: float = setting(0.3, "of the logarithm of the length; 1 and more: a long tail", NOT_NEGATIVE)
    longest: int = setting(160, "tokens at which a completion is cut", POSITIVE)
    lengths: tuple[int, ...] = setting(
        (), "measured lengths to draw from instead", Limit(lambda lengths: all(n >= 1 for n in lengths), "1 or more")
    )
    prompt: float = setting(60.0, "tokens of a prompt", NOT_NEGATIVE)
    accept_rates: tuple[float, ...] = setting((0.8, 0.75, 0.7), "of draft k, once those before it were accepted", RATES)
    draft_tokens: int = setting(3, "K, drafts per cycle; 0: plain decoding", within(0, 64))

    def _validate(self) -> None:
        enough = self.draft_tokens <= len(self.accept_rates)
        self.require(enough, "draft_tokens", "completions.accept_rates needs a rate for each draft")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsConfig(Settings):
    """Seconds of everything that takes time."""

    SECTION = "costs."
    cycle: float = setting(0.004, "of a pass of the target over one row, K = 0", above(0))
    row: float = setting(0.0004, "of each further row", NOT_NEGATIVE)
    position: float = setting(0.0001, "of each further position of a row: the drafts that are verified", NOT_NEGATIVE)
    draft: float = setting(0.001, "of a draft step", NOT_NEGATIVE)
    draft_row: float = setting(0.0001, "of each further row of it", NOT_NEGATIVE)
    cycles: tuple[tuple[int, int, float], ...] = setting(
        (), "measured [K, rows, seconds] of cycles, used where K is among them instead of the five above", CYCLES
    )
    prefill: float = setting(0.002, "of an admission: the pass over the prompt", NOT_NEGATIVE)
    update: float = setting(0.2, "of an update, whatever its size", NOT_NEGATIVE)
    update_token: float = setting(0.0002, "of each token trained on, prompts included", NOT_NEGATIVE)
    weights: float = setting(0.004, "gigabytes of the weights that are sent", NOT_NEGATIVE)
    bandwidth: float = setting(1.0, "gigabytes a second into one worker", above(0))
    fetch: float = setting(0.05, "until the trainer has its weights together", NOT_NEGATIVE)
    load: float = setting(0.01, "to take weights in, between two cycles", NOT_NEGATIVE)
    report: float = setting(0.01, "from the end of a completion to its place in the buffer", NOT_NEGATIVE)
    step: float = setting(0.05, "of each update beside all that: metrics, monitor, log", NOT_NEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateConfig(Settings):
    """A whole simulation."""

    fleet: FleetConfig = section(FleetConfig)
    completions: CompletionsConfig = section(CompletionsConfig)
    costs: CostsConfig = section(CostsConfig)
    grain: int = setting(1, "tokens that are counted as one: completions of many thousands need less memory", POSITIVE)
    split: bool = setting(True, "look for the best split of the GPUs between trainer and rollouts")
    sweep: bool = setting(True, "look for the draft length and batch at which speculation pays most")
    seed: int = setting(0, "of the lengths", SEED)
    dir: str | None = setting(None, "where simulation.json and simulation.html go; null: nowhere", NOT_EMPTY)
