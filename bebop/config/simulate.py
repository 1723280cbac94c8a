"""Define the settings of a simulation: the dataclasses behind ``conf/simulate.yaml``."""

from dataclasses import dataclass
from typing import Literal

from bebop.config.fields import (
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
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
    """Sizes of the simulated job: as ``rollout.*`` and ``trainer.*`` of a real one."""

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
    """Lengths of completions, a log-normal with a long tail, and the acceptance rates of their drafts."""

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
    """Durations in seconds of all simulated operations, and the sizes and rates of weight transfers."""

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
    """Configuration of a whole simulation."""

    fleet: FleetConfig = section(FleetConfig)
    completions: CompletionsConfig = section(CompletionsConfig)
    costs: CostsConfig = section(CostsConfig)
    grain: int = setting(1, "tokens that are counted as one: completions of many thousands need less memory", POSITIVE)
    split: bool = setting(True, "look for the best split of the GPUs between trainer and rollouts")
    sweep: bool = setting(True, "look for the draft length and batch at which speculation pays most")
    seed: int = setting(0, "of the lengths", SEED)
    dir: str | None = setting(None, "where simulation.json and simulation.html go; null: nowhere", NOT_EMPTY)


# ---- prediction of the speed-up (``python -m bebop.simulate --gpu``)

ROWS_LIMIT = 1 << 20
SIZE = within(1, 1 << 24)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaysConfig(Settings):
    """Options of ``python -m bebop.simulate --gpu NAME``; each setting is an option of the same name."""

    SECTION = "--"
    gpu: str = setting("h100", "the card, a row of PEAKS in benchmarks/peaks.py")
    gpus: int = setting(8, "GPUs that decode", within(1, 1 << 16))
    params: str = setting(
        "7b", "the model's size, such as 7b or 30b-a3b: shapes of known models, others by their layers"
    )
    model: str | None = setting(
        None, "a checkpoint's folder: its config.json gives the shape instead of --params", NOT_EMPTY
    )
    layers: int | None = setting(None, "decoder layers, in place of the shape's, as all sizes that follow", SIZE)
    hidden: int | None = setting(None, "hidden size", SIZE)
    heads: int | None = setting(None, "attention heads", SIZE)
    kv_heads: int | None = setting(None, "heads of keys and values", SIZE)
    head_dim: int | None = setting(None, "numbers of one head", SIZE)
    intermediate: int | None = setting(None, "width of the MLP", SIZE)
    vocabulary: int | None = setting(None, "tokens of the vocabulary", SIZE)
    experts: int | None = setting(None, "experts of a layer, 0 for a dense model", within(0, 1 << 16))
    active_experts: int | None = setting(None, "experts that a token goes through", within(0, 1 << 16))
    expert_intermediate: int | None = setting(None, "width of one expert", SIZE)
    dtype: Literal["bf16", "fp8"] = setting("bf16", "of the weights; products count at the rate of bf16 either way")
    tensor_parallel: int | None = setting(
        None,
        "GPUs of one engine; by default the fewest that leave a third of their memory to the cache",
        within(1, 4096),
    )
    prompt: int = setting(512, "tokens of a prompt", within(0, 1 << 24))
    length: int = setting(2048, "tokens of a completion, the median", within(1, 1 << 24))
    longest: int = setting(8192, "tokens at which a completion is cut", within(1, 1 << 24))
    tail: float = setting(0.7, "sigma of the log-normal length of completions; 0: all have the median", within(0, 4))
    completions: int | None = setting(
        None, "completions of a step, over all engines; by default as many as fit the memory, 256 an engine at most",
        within(1, ROWS_LIMIT),
    )  # fmt: skip
    accept: tuple[float, ...] = setting(
        (0.7,),
        "chance that a draft is accepted once those before it were: one for all, or one a draft (0.9,0.8,0.7)",
        RATES,
    )
    accept_length: float | None = setting(
        None, "tokens of a cycle at --draft-tokens, bonus token included, instead of --accept", within(1, 65)
    )
    draft_tokens: int = setting(3, "K, drafts of a cycle", within(1, 64))
    verify: int | None = setting(None, "drafts that are verified, for a tree; by default K, a chain", within(1, 1024))
    drafter: Literal["mtp", "eagle", "ngram"] = setting(
        "mtp",
        "mtp: a layer and the whole vocabulary; eagle: a layer and --draft-vocabulary; ngram: a free lookup",
    )
    draft_vocabulary: int = setting(32000, "tokens that an EAGLE-3 draft chooses from", SIZE)
    step_ms: float | None = setting(
        None, "measured milliseconds of a step of plain decoding at --step-rows, to which the prediction is fitted",
        within(1e-3, 1e5),
    )  # fmt: skip
    step_rows: int = setting(1, "completions of an engine at which --step-ms was measured", within(1, ROWS_LIMIT))
    rollout_share: float = setting(
        0.7, "share of an RL step that is decoding, for the speed-up of the whole step", SHARE
    )

    def _validate(self) -> None:
        enough = len(self.accept) == 1 or len(self.accept) >= self.draft_tokens
        self.require(enough, "accept", "give one chance, or one for each of --draft-tokens")
        if self.accept_length is not None:
            most = self.draft_tokens + 1
            self.require(self.accept_length <= most, "accept_length", f"K = {self.draft_tokens} makes {most} at most")
        if self.tensor_parallel is not None:
            whole = self.gpus % self.tensor_parallel == 0
            self.require(whole, "tensor_parallel", f"it must divide --gpus={self.gpus}")
        if self.verify is not None:
            self.require(self.verify >= self.draft_tokens, "verify", "give --draft-tokens or more")
        self.require(self.length <= self.longest, "length", f"it must be --longest={self.longest} at most")


# ---- memory of a job (``python -m bebop.simulate memory``)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig(Settings):
    """Settings of ``python -m bebop.simulate memory``, each given as NAME=VALUE."""

    model: str = setting("qwen3-8b", "a checkpoint's folder, or a size such as 7b or qwen3-8b", NOT_EMPTY)
    gpu: str = setting("h100", "the card, a row of PEAKS in benchmarks/peaks.py", NOT_EMPTY)
    gpus: int = setting(8, "GPUs of the trainer, as trainer.ranks of a job", within(1, 8))
    dtype: Literal["float32", "bfloat16"] = setting("bfloat16", "as model.dtype of a job")
    max_tokens: int | None = setting(None, "as trainer.max_tokens; null: as the trainer chooses", SIZE)
    checkpointing: bool | None = setting(None, "as trainer.checkpointing; null: as the trainer chooses")
    gradient_sync: Literal["auto", "minibatch", "micro_batch"] = setting("auto", "as trainer.gradient_sync")
    kl: bool = setting(False, "whether there is a reference model, as with algorithm.kl_coefficient above 0")
    cotrain: bool = setting(False, "whether an MTP head is trained beside the policy")
    staleness: int = setting(1, "as rollout.staleness: versions kept in the machine's own memory", within(0, 1 << 10))
    engine_share: float = setting(0.0, "of each GPU's memory that an engine beside the trainer holds", SHARE)
