"""What can be configured about an adaptation: the dataclasses behind ``conf/adapt.yaml``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bebop.config import HeadConfig, ModelConfig, ObjectiveName, SamplingConfig, TaskConfig
from bebop.parsing import MAX_SEED, MOST, check, not_empty, one_of, readable_rows, within


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Sequences to train on: sampled by the model itself (default), or read from a file."""

    source: Literal["sample", "file"] = "sample"
    sequences: int = 1200  # sampled answers; from a file: the most that are read, 0 for all
    path: str | None = None  # .jsonl or .parquet, for source=file
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    slots: int = 64  # answers decoded side by side
    max_length: int = 512  # prompt + answer, tokens
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        one_of("data.source", self.source, Literal["sample", "file"])
        readable_rows("data.path", self.path, needed=self.source == "file")
        for name in ("prompt_key", "answer_key"):
            not_empty(f"data.{name}", getattr(self, name))
        lowest = 0 if self.source == "file" else 1  # 0: all rows of a file
        check(self.sequences >= lowest, "data.sequences", self.sequences, f"give {lowest} or more")
        check(self.slots >= 1, "data.slots", self.slots, "give 1 or more")
        fits = self.sampling.max_new_tokens < self.max_length
        check(fits, "data.max_length", self.max_length, "it must exceed data.sampling.max_new_tokens")
        plain = self.sampling.min_p == 0 and self.sampling.repetition_penalty == 1
        both = {name: getattr(self.sampling, name) for name in ("min_p", "repetition_penalty")}
        check(plain, "data.sampling", both, "the losses know temperature, top_p and top_k; leave these at 0 and 1")
        hot = self.sampling.temperature > 0
        check(hot, "data.sampling.temperature", self.sampling.temperature, "adaptation learns from samples: > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, on how much at a time, and from what."""

    steps: int = 160
    rows_per_step: int = 32
    warm_objective: str = "ce"  # of the first steps: a draft that shares no token with the target has no TV gradient
    warm_steps: int | None = None  # null: none for a head that came with the checkpoint, a third for a fresh one
    eval_every: int = 40  # steps between evaluations on held-out text; 0: only at both ends
    save_every: int = 80  # steps between checkpoints for resuming; 0: only at the end
    keep: int = 2
    threads: int = 2  # CPU threads
    cache_mb: int = 1024  # the backbone's hidden states of the training text are computed once if they fit; 0: never

    def __post_init__(self) -> None:
        one_of("train.warm_objective", self.warm_objective, ObjectiveName)
        within("train.threads", self.threads, 1, MOST)
        for name in ("steps", "rows_per_step", "keep"):
            check(getattr(self, name) >= 1, f"train.{name}", getattr(self, name), "give 1 or more")
        for name in ("eval_every", "save_every"):
            check(getattr(self, name) >= 0, f"train.{name}", getattr(self, name), "give 0 (at the end) or more")
        check(self.cache_mb >= 0, "train.cache_mb", self.cache_mb, "give 0 (never) or more")
        warm = self.warm_steps
        fits = warm is None or 0 <= warm <= self.steps
        check(fits, "train.warm_steps", warm, f"give a number from 0 to train.steps={self.steps}, or null")

    def warm(self, fresh: bool) -> int:
        """Steps of the warm-up objective, for a fresh head or for one that came with the checkpoint."""
        return (self.steps // 3 if fresh else 0) if self.warm_steps is None else self.warm_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Held-out prompts, on which acceptance is measured before and after."""

    prompts: int = 192
    draft_tokens: int = 3  # K

    def __post_init__(self) -> None:
        check(self.prompts >= 2, "evaluation.prompts", self.prompts, "intervals need 2 or more")
        check(1 <= self.draft_tokens <= 16, "evaluation.draft_tokens", self.draft_tokens, "give a number from 1 to 16")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptConfig:
    """A whole adaptation."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    dir: str | None = None  # the run folder; null: runs/adapt-<date and time>
    out: str | None = None  # the adapted checkpoint; null: <dir>/model
    resume: bool = False  # go on from the newest checkpoint in ``dir``
    seed: int = 0
    tensorboard: bool = True
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("dir", "out"):
            not_empty(name, getattr(self, name))
        check(0 <= self.seed < MAX_SEED, "seed", self.seed, f"give a number from 0 to {MAX_SEED - 1}")
        check(not self.resume or bool(self.dir), "resume", self.resume, "give the run's folder as dir")
        same = self.out is None or Path(self.out).resolve() != Path(self.model.path).resolve()
        check(same, "out", self.out, "it is model.path: give another folder, the original is kept")
