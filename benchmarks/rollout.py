"""Decoding speed on one engine: plain, target-only and Bebop decoding beside Hugging Face ``generate``.

The built-in model answers its own task, so acceptance is real. Every arm answers the same prompts; the arms take turns,
and the best of the rounds counts, since other work on the machine can only slow a run down.
"""

import dataclasses
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from bebop.bench.record import best_of
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.lean import as_modules
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import Completion, DecodeStats, SamplingParams

# The rule for draft_tokens=auto, older than the run: least shares, at every batch size, of the speed of plain decoding
# and of the best fixed number of drafts.
PLAIN, BEST = 0.98, 0.95


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutBench:
    """Settings of the benchmark."""

    model: ModelConfig
    task: TaskConfig
    systems: tuple[str, ...]
    batches: tuple[int, ...]
    draft_tokens: int | Literal["auto"]  # auto: beside every number up to ``most_drafts``
    rounds: int
    waves: int  # requests = waves * batch
    max_new_tokens: int = 160
    most_drafts: int = 5

    def arms(self) -> dict[str, DecodingConfig]:
        """Return the decoding of each arm, by the name of its row."""
        made = {}
        for name in self.systems:
            system = SYSTEMS[name]
            if self.draft_tokens == "auto" and system.free_length:
                most = min(self.most_drafts, system.width)
                for drafts in range(1, most + 1):
                    made[f"{name} {drafts}"] = DecodingConfig(system=name, draft_tokens=drafts)
                made[f"{name} auto"] = DecodingConfig(system=name, draft_tokens="auto", most_drafts=most)
            else:
                drafts = system.draft_tokens if self.draft_tokens == "auto" else self.draft_tokens
                made[name] = DecodingConfig(system=name, draft_tokens=min(drafts, system.width))
        return made


def run(bench: RolloutBench) -> list[dict[str, Any]]:
    """Return one row per arm and batch size."""
    policy = load_with_parts(bench.model, bench.systems)
    source = PromptSource(bench.task, chat_encoder(policy.tokenizer), 1024)
    configs = bench.arms()
    arms = [*configs] if bench.draft_tokens == "auto" else ["hf_generate", *configs]
    rows = []
    progress = tqdm(total=len(bench.batches) * bench.rounds * len(arms), desc="rollout")
    for batch in bench.batches:
        asked = requests(bench, policy, source, max(12, batch * bench.waves))
        best = best_of(
            bench.rounds, arms, partial(measure, bench, policy, asked, batch), "tokens/s", progress, batch=batch
        )
        undrafted = next((arm for arm in bench.systems if not SYSTEMS[arm].drafts), arms[0])
        plain = best[undrafted]["tokens/s"]
        for arm in arms:
            speed = best[arm]["tokens/s"]
            row = {"batch": batch, "arm": arm, "tokens/s": speed, "x plain": speed / plain, **best[arm]}
            row |= _held(best, arm, plain)
            if arm in configs:  # apart from what is timed, as counting takes time
                row["MFLOP/token"] = _megaflops(policy, asked[:batch], configs[arm])
            rows.append(row)
    progress.close()
    return rows


def load_with_parts(model: ModelConfig, systems: Sequence[str]) -> Policy:
    """Return the policy with the head, the trained parts and the draft model that the systems need."""
    chosen = [SYSTEMS[name] for name in systems]
    needs = sorted({part for system in chosen for part in system.needs})
    head, draft = (any(getattr(system, name) for system in chosen) for name in ("head", "separate"))
    return load_policy(model, need_head=head, needs=needs, need_draft=draft)


def _held(best: Mapping[str, dict[str, Any]], arm: str, plain: float) -> dict[str, Any]:
    """Compare a chosen number of drafts with the best fixed one, plain decoding included."""
    name, chosen, rest = arm.partition(" auto")
    if not chosen or rest:
        return {}
    speed = best[arm]["tokens/s"]
    of_best = speed / max(
        plain, *(best[other]["tokens/s"] for other in best if other.partition(" ")[0] == name and other != arm)
    )
    return {"x best fixed": of_best, "holds": speed >= PLAIN * plain and of_best >= BEST}


def requests(bench: RolloutBench, policy: Policy, source: PromptSource, count: int) -> list[Request]:
    """Return requests for the prompts in groups of four, as in training."""
    return [
        Request(
            id=i,
            token_ids=source.prompt(i // 4).token_ids,
            params=SamplingParams(
                max_new_tokens=bench.max_new_tokens, stop_token_ids=policy.eos_token_ids, seed=i
            ),
        )
        for i in range(count)
    ]  # fmt: skip


def measure(bench: RolloutBench, policy: Policy, asked: Sequence[Request], batch: int, arm: str) -> dict[str, Any]:
    """Time one turn of an arm, a system or ``hf_generate``; return its row.

    On a GPU the parts are timed in a second run: timing a part waits for the device, which the engine does only once a
    cycle.
    """
    if arm == "hf_generate":
        return _hugging_face(bench, policy, asked, batch)
    engine = TorchEngine(policy, bench.arms()[arm], slots=batch, max_length=512)
    undisturbed = _decoded(engine, asked) if torch.cuda.is_available() else None
    with split(engine) as seconds:
        answers, whole = _decoded(engine, asked)
    answers, total = undisturbed or (answers, whole)
    stats = DecodeStats.total(a.stats for a in answers)
    shares = {f"{part} %": 100 * spent / whole for part, spent in seconds.items()}
    return {
        "tokens/s": stats.tokens / total,
        "accept length": stats.accept_length,
        "passes/token": stats.target_forwards / stats.tokens,
        "extra positions/pass": stats.extra_positions / stats.target_forwards,
        "mean answer": stats.tokens / len(answers),
        **{f"{name}/draft": float(sums.sum() / stats.reached.sum()) for name, sums in stats.counts.items()},
        **shares,
        "other %": 100 - sum(shares.values()),
    }


def _decoded(engine: TorchEngine, asked: Sequence[Request]) -> tuple[list[Completion], float]:
    """Return the completions and the seconds that they took."""
    started = time.perf_counter()
    answers = generate(engine, asked)
    return answers, time.perf_counter() - started


@contextmanager
def products(policy: Policy, engine: TorchEngine) -> Iterator[list[float]]:
    """Count floating-point operations of the block's cycles: two per weight and position, of all linear layers.

    Drafter, target and other parts count alike, as do padded rows. Prefill and attention's products of queries and keys
    do not.
    """
    spent, decoder = [0.0], engine.decoder
    cycling = [False]

    def cycle(*args: Any) -> Any:
        cycling[0] = True
        try:
            return type(decoder).cycle(decoder, *args)
        finally:
            cycling[0] = False

    def count(module: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
        if cycling[0]:
            assert isinstance(module, torch.nn.Linear)
            spent[0] += 2.0 * module.weight.numel() * (inputs[0].numel() // module.in_features)

    owners = [*policy.modules(), *policy.parts.values()]
    layers = {id(m): m for owner in owners for m in owner.modules() if isinstance(m, torch.nn.Linear)}
    hooks = [layer.register_forward_pre_hook(count) for layer in layers.values()]
    setattr(decoder, "cycle", cycle)  # noqa: B010
    try:
        with as_modules():  # a lean pass does not call them
            yield spent
    finally:
        delattr(decoder, "cycle")
        for hook in hooks:
            hook.remove()


@contextmanager
def split(engine: TorchEngine) -> Iterator[dict[str, float]]:
    """Time prefill, verification and drafting in seconds while the block runs; the rest is sampling and bookkeeping."""
    seconds: dict[str, float] = defaultdict(float)
    parts = engine.decoder.stages()

    def timed(method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = method(*args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            seconds[part] += time.perf_counter() - started
            return result

        return call

    for owner, name, part in parts:
        setattr(owner, name, timed(getattr(owner, name), part))
    try:
        yield seconds
    finally:
        for owner, name, _ in parts:
            delattr(owner, name)


def _megaflops(policy: Policy, asked: Sequence[Request], config: DecodingConfig) -> float:
    engine = TorchEngine(policy, config, slots=len(asked))
    with products(policy, engine) as spent:
        answers = generate(engine, asked)
    return spent[0] / sum(len(answer.token_ids) for answer in answers) / 1e6


def _hugging_face(bench: RolloutBench, policy: Policy, asked: Sequence[Request], batch: int) -> dict[str, Any]:
    """Run the same requests through ``generate``, left-padded; each batch waits for its longest completion."""
    stock = AutoModelForCausalLM.from_config(policy.backbone.config.__class__(**policy.backbone.config.to_dict()))
    stock.load_state_dict(policy.backbone.state_dict())
    stock = stock.to(dtype=policy.backbone.dtype, device=policy.device).eval()
    pad, ends, tokens, passes, total = 0, set(policy.eos_token_ids), 0, 0, 0.0
    torch.manual_seed(0)
    for start in range(0, len(asked), batch):
        prompts = [list(r.token_ids) for r in asked[start : start + batch]]
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts], device=policy.device)
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=policy.device)
        started = time.perf_counter()
        with torch.inference_mode():
            out = stock.generate(
                ids, attention_mask=mask, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
                max_new_tokens=bench.max_new_tokens, pad_token_id=pad, eos_token_id=sorted(ends),
            )  # fmt: skip
        total += time.perf_counter() - started
        answers = out[:, width:].tolist()
        tokens += sum(next((i + 1 for i, t in enumerate(a) if t in ends), len(a)) for a in answers)
        passes += len(answers) * len(answers[0])
    return {"tokens/s": tokens / total, "passes/token": passes / tokens, "mean answer": tokens / len(asked)}
