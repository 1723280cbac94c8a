"""Drafts from past completions in vLLM beside the embedded engine: acceptance before and after they receive them.

The past completions are the built-in model's own under its current weights: the best case, as in ``history``. Every arm
answers each prompt once, all at once. It knows nothing, only past completions of other prompts, or those of the same
prompt. vLLM has one tree for all prompts; the embedded engine searches only completions of the same prompt. vLLM drafts
the likeliest tokens (``decoding.draft_temperature=0``). The embedded engine also does, or it samples, which is its
default. Intervals are over prompts; those of differences are over the same prompts.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bebop.bench.engines import version_of
from bebop.bench.history import Past, remembered
from bebop.bench.record import noted
from bebop.config.job import (
    DecodingConfig,
    JobConfig,
    ModelConfig,
    MonitorConfig,
    RolloutConfig,
    SamplingConfig,
    TaskConfig,
)
from bebop.errors import UserError
from bebop.metrics.intervals import ratio, ratio_difference
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import Completion, SamplingParams

SYSTEM = "history"
ARMS: Mapping[str, tuple[str, float | None]] = {  # name: program, draft temperature
    "vllm, greedy drafts": ("vllm", 0.0),
    "embedded, greedy drafts": ("bebop-rl", 0.0),
    "embedded, sampled drafts": ("bebop-rl", None),
}
KNOWN = NOTHING, OTHERS, OWN = "nothing", "other prompts'", "the prompt's"  # whose past answers
Counts = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimingBench:
    """Settings of the benchmark."""

    model: ModelConfig
    task: TaskConfig
    prompts: int = 96
    answers: int = 8  # past ones of each prompt
    draft_tokens: int = SYSTEMS[SYSTEM].draft_tokens
    max_new_tokens: int = 160


Turn = tuple[Sequence[Request], Past]  # what is asked, and what is told of before


def run(bench: PrimingBench) -> list[dict[str, Any]]:
    """Return a row for each arm and each kind of knowledge."""
    if find_spec("vllm") is None:
        raise UserError("bench told needs vLLM: pip install -e '.[vllm]', see recipes/vllm")
    policy = load_policy(bench.model)
    source = PromptSource(bench.task, chat_encoder(policy.tokenizer), 1024)
    params = SamplingParams(max_new_tokens=bench.max_new_tokens, stop_token_ids=policy.eos_token_ids)
    prompts = dict.fromkeys(source.prompt(i).token_ids for i in range(bench.prompts))
    asked = [Request(id=i, token_ids=ids, params=replace(params, seed=i)) for i, ids in enumerate(prompts)]
    past = remembered(TorchEngine(policy, DecodingConfig(system="autoregressive"), slots=32), asked, bench.answers)
    rows = []
    with ExitStack() as stack, tqdm(total=len(ARMS) * len(KNOWN), desc="told") as progress:
        served = stack.enter_context(closing(vllm(bench)))
        for arm, (program, temperature) in ARMS.items():
            counts = {}
            for known in KNOWN:
                found: dict[int, Completion] = {}
                for chosen, told in turns(asked, past, known):
                    one = forgotten(served) if program == "vllm" else embedded(bench, policy, temperature)
                    for prompt, answers in told.items():
                        one.remember(prompt, answers)
                    found |= zip([each.id for each in chosen], generate(one, chosen), strict=True)
                counts[known] = by_prompt([found[one.id] for one in asked])
                rows.append(noted({"arm": arm, "known": known, **row(counts, known), "version": version_of(program)}))
                progress.update()
    return rows


def turns(asked: Sequence[Request], past: Past, known: str) -> list[Turn]:
    """Return turns in which every prompt is asked once.

    If only other prompts' completions are known, there are two halves, and each knows those of the other.
    """
    if known != OTHERS:
        return [(asked, past if known == OWN else {})]
    halves = asked[::2], asked[1::2]
    return [
        (chosen, {one.token_ids: past[one.token_ids] for one in others}) for chosen, others in (halves, halves[::-1])
    ]


def by_prompt(found: Sequence[Completion]) -> Counts:
    """Return tokens, cycles, drafts and accepted drafts of each completion [4, S], one column each."""
    stats = [one.stats for one in found]
    return np.array([[s.emitted, s.cycles, s.reached.sum(), s.accepted.sum()] for s in stats], dtype=float).T


def row(counts: Mapping[str, Counts], known: str) -> dict[str, Any]:
    """Return the rates of an arm, and the change of its accept length from that with nothing known."""
    tokens, cycles, drafts, accepted = counts[known]
    found = {"accept length": asdict(ratio(tokens, cycles)), "accepted": asdict(ratio(accepted, drafts))}
    found["drafts/cycle"] = asdict(ratio(drafts, cycles))
    if known != NOTHING:
        before = counts[NOTHING]
        found["gain"] = asdict(ratio_difference((tokens, cycles), (before[0], before[1])))
    return found


def embedded(bench: PrimingBench, policy: Policy, temperature: float | None) -> TorchEngine:
    """Return a new embedded engine."""
    decoding = DecodingConfig(system=SYSTEM, draft_tokens=bench.draft_tokens, draft_temperature=temperature)
    return TorchEngine(policy, decoding, slots=32)


def vllm(bench: PrimingBench) -> ServedEngine:
    """Start vLLM in this process, with a slot for each prompt."""
    from bebop.rollout.vllm.builder import make

    config = JobConfig(
        model=bench.model,
        task=bench.task,
        decoding=DecodingConfig(system=SYSTEM, draft_tokens=bench.draft_tokens, draft_temperature=0.0),
        rollout=RolloutConfig(
            engine="vllm",
            slots=bench.prompts,
            max_length=512,
            sampling=SamplingConfig(max_new_tokens=bench.max_new_tokens),
        ),
        monitor=MonitorConfig(decode_stats=False),
    )
    return make(config)[0]


def forgotten(engine: ServedEngine) -> ServedEngine:
    """Clear the past completions of the engine and return it."""
    server: Any = engine.server
    server.core.past.clear()
    return engine
