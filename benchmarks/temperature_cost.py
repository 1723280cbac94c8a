"""Cost of choosing draft temperatures: its share of a cycle's processor time, from a request's first cycle on.

A model without an MTP head gets a fresh one: the cost of choosing does not depend on the drafts. All requests start at
once, so their first cycles, which are measured most often, coincide; in a job they do not.
"""

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from tqdm import tqdm

from bebop.bench.record import noted, timed
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.mtp import MTPHead
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.mtp import MTPDrafter
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import SamplingParams

# The rule, older than the run: the most percent of a cycle.
BUDGET = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CostBench:
    """Settings of the benchmark."""

    models: tuple[ModelConfig, ...]
    task: TaskConfig
    batches: tuple[int, ...]
    rounds: int
    cycles: int  # of every request, from its first on
    draft_tokens: int


def run(bench: CostBench) -> list[dict[str, Any]]:
    """Return one row per model and batch size; the round with the fastest cycles counts."""
    rows = []
    with tqdm(total=len(bench.models) * len(bench.batches) * bench.rounds, desc="cost") as progress:
        for model in bench.models:
            policy = with_head(load_policy(model, need_head=False))
            source = PromptSource(bench.task, chat_encoder(policy.tokenizer), 1024)
            for batch in bench.batches:
                prompts = [source.prompt(i // 4).token_ids for i in range(batch)]
                found = []
                for _ in range(bench.rounds):
                    found.append(turn(policy, prompts, bench.cycles, bench.draft_tokens))
                    noted({"model": model.path, "batch": batch, **found[-1]})
                    progress.update()
                best = min(found, key=lambda row: float(row["cycle ms"]))
                rows.append({"model": model.path, "vocabulary": policy.vocab_size, "batch": batch, **best})
    return rows


def with_head(policy: Policy) -> Policy:
    """Return the policy with a fresh MTP head if it has none."""
    if policy.mtp is not None:
        return policy
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return replace(policy, mtp=MTPHead(policy.backbone).to(policy.backbone.dtype).eval())


@torch.inference_mode()
def turn(policy: Policy, prompts: list[tuple[int, ...]], cycles: int, drafts: int) -> dict[str, Any]:
    """Measure one turn; the cycle that reads the prompts counts without that reading."""
    tokens = cycles * (drafts + 1) + 1
    config = DecodingConfig(draft_tokens=drafts, draft_temperature="auto")
    engine = TorchEngine(policy, config, slots=len(prompts), max_length=max(map(len, prompts)) + tokens)
    for i, prompt in enumerate(prompts):
        engine.add(Request(id=i, token_ids=prompt, params=SamplingParams(max_new_tokens=tokens, seed=i)))
    spent: list[float] = []
    choosing: list[float] = []
    assert isinstance(engine.decoder, DraftVerify) and isinstance(engine.decoder.drafter, MTPDrafter)
    with timed(engine.decoder.drafter.tempered, "choose", "observe") as inside:
        engine._admit()
        for _ in range(cycles):
            before, began = len(inside), time.process_time()
            engine.step()
            spent.append(time.process_time() - began)
            choosing.append(sum(inside[before:]))
    share = 100 * sum(choosing) / sum(spent)
    return {
        "cycle ms": 1e3 * sum(spent) / cycles,
        "choosing ms": 1e3 * sum(choosing) / cycles,
        "largest ms": 1e3 * max(choosing),
        "share %": share,
        "holds": share <= BUDGET,
    }
