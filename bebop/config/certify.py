"""Define the settings of a certificate: the dataclasses behind ``conf/certify.yaml``."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bebop.config.decoding import DecodingConfig
from bebop.config.fields import (
    BETWEEN_0_AND_1,
    MAX_PROCESSES,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    Settings,
    above,
    section,
    setting,
    within,
)
from bebop.config.job import SEED, ModelConfig, SamplingConfig, TaskConfig
from bebop.systems import SYSTEMS

URL = Limit(lambda url: re.match(r"https?://[^/\s]", url) is not None, "give http://HOST:PORT or https://...")
HEAT = Limit(lambda t: t == 0 or 1e-4 <= t < 1e4, "give 0 (no stress setting), or 0.0001 or more")
TOKENS, LIMIT = 20_000, 0.02
QUICK_TOKENS, QUICK_LIMIT = 2_500, 0.05  # two settings of 2,500 tokens exclude about 3 % with the built-in model
LogprobMode = Literal["auto", "raw", "temperature", "processed", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig(Settings):
    """The engine under test and its address."""

    SECTION = "engine."
    name: Literal["embedded", "sglang", "openai", "function"] = setting("embedded", "which kind")
    url: str | None = setting(None, "of a running server: for sglang and openai", URL)
    api_key_env: str = setting("BEBOP_API_KEY", "the environment variable with its key, if it wants one", NOT_EMPTY)
    other_url: str | None = setting(
        None, "a server of the same model without drafts, for reference=none; the embedded engine needs none", URL
    )
    model: str | None = setting(None, "the model's name at an OpenAI-compatible server; null: its only one", NOT_EMPTY)
    function: str | None = setting(None, "package.module:function, for function", NOT_EMPTY)
    slots: int = setting(32, "requests decoded side by side by the embedded engine", POSITIVE)
    cuda_graphs: bool = setting(False, "certify cycles of the embedded engine that are CUDA graphs; on a GPU")
    timeout: float = setting(600.0, "for one completion of a server", above(0, unit="seconds"))

    def _validate(self) -> None:
        served = self.name in ("sglang", "openai")
        self.require(bool(self.url) or not served, "url", f"engine.name={self.name} needs http://HOST:PORT")
        named = self.name != "function" or bool(self.function and ":" in self.function)
        self.require(named, "function", "engine.name=function needs package.module:function")
        graphs = not self.cuda_graphs or self.name == "embedded"
        self.require(graphs, "cuda_graphs", f"engine.name={self.name} captures its own: give false")


@dataclass(frozen=True, slots=True, kw_only=True)
class CertifyConfig(Settings):
    """Configuration of a whole certificate."""

    model: ModelConfig = section(ModelConfig)
    task: TaskConfig = section(TaskConfig)
    decoding: DecodingConfig = section(DecodingConfig)
    engine: EngineConfig = section(EngineConfig)
    sampling: SamplingConfig = section(SamplingConfig)
    reference: Literal["model", "server", "none"] = setting(
        "model",
        "model: the Hugging Face checkpoint of model.path; server: the server's own prefill, which sees the "
        "speculative path alone; none: completions against those of an engine without drafts, which is weak",
    )
    logprobs: LogprobMode = setting("auto", "what the engine's log-probs are declared to be; none: it reports none")
    quick: bool = setting(
        False, f"some {QUICK_TOKENS * 2:,} tokens in all, in a minute; it says what that many can see"
    )
    tokens: int | None = setting(
        None, f"completion tokens at each setting; null: {TOKENS:,}, or with quick {QUICK_TOKENS:,}", POSITIVE
    )
    stress: float = setting(2.0, "temperature of a second setting, which brings other faults to light; 0: none", HEAT)
    white_box: bool = setting(True, "test the draws inside verification, where the engine lets one look")
    cohort: int = setting(16, "requests that are asked side by side; two of a prompt", within(2, MAX_PROCESSES))
    max_length: int = setting(512, "prompt + completion, tokens; more than sampling.max_new_tokens")
    alpha: float = setting(
        1e-4, "chance of a false alarm", Limit(lambda a: 0 < a <= 0.05, "give a number above 0 and at most 0.05")
    )
    limit_tv: float | None = setting(
        None,
        f"largest total variation a token that passes; null: {LIMIT}, or with quick {QUICK_LIMIT}",
        BETWEEN_0_AND_1,
    )
    stop_when_found: bool = setting(True, "end as soon as a fault is proved")
    stop_when_bounded: bool = setting(True, "end a setting as soon as limit_tv is excluded; false: go on to tokens")
    dir: str | None = setting(None, "where certificate.json and report.html go; null: runs/certify-<time>", NOT_EMPTY)
    seed: int = setting(0, "of the completions", SEED)
    first_prompt: int = setting(0, "number of the first question in the task's stream", NOT_NEGATIVE)
    threads: int = setting(2, "CPU threads", within(1, MAX_PROCESSES))
    progress: bool = setting(True, "show a progress bar")

    @property
    def tokens_asked(self) -> int:
        """Return the completion tokens at each setting, chosen or by default."""
        return self.tokens or (QUICK_TOKENS if self.quick else TOKENS)

    @property
    def limit(self) -> float:
        """Return the largest total variation per token that passes, chosen or by default."""
        return self.limit_tv or (QUICK_LIMIT if self.quick else LIMIT)

    def _validate(self) -> None:
        self.require(self.cohort % 2 == 0, "cohort", "two requests have the same prompt: give an even number")
        self.require(not self.sampling.stop, "sampling.stop", "completions are certified by their tokens: give none")
        self.require(self.sampling.temperature > 0, "sampling.temperature", "a certificate is about samples: > 0")
        fits = self.sampling.max_new_tokens < self.max_length
        self.require(fits, "max_length", "it must exceed sampling.max_new_tokens")
        served = self.engine.name in ("sglang", "openai")
        self.require(self.reference != "server" or served, "reference", "there is no server: choose model")
        known = SYSTEMS[self.decoding.system].exact or self.engine.name != "embedded"
        self.require(known, "decoding.system", "it claims no distribution: choose an exact one")
        inside = self.engine.cuda_graphs and self.white_box
        self.require(not inside, "engine.cuda_graphs", "a graph lets nobody look inside: give white_box=false too")
        free = self.dir is None or not (Path(self.dir) / "certificate.json").exists()
        self.require(free, "dir", "it holds a certificate already: choose another folder")
