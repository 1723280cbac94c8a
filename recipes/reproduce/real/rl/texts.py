"""Completions of the first policy that no run learns from.

Heads are trained on some of them before RL. Others are the fixed texts, and the material of planted streams.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from bebop.adaptation.corpus import read_corpus, run_engine, token_rows, write_corpus
from bebop.config.adapt import DataConfig
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.model.backbone import Policy
from bebop.tasks.source import chat_encoder
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Prompt
from recipes.reproduce.real.rl.plan import RLPlan
from recipes.reproduce.real.rl.task import KINDS, THINGS, questions

PLAIN = DecodingConfig(system="autoregressive", draft_tokens=0)


def fixed_texts(plan: RLPlan, place: Path, model: Policy) -> list[TokenRow]:
    """Return one completion for each held-back question, stored in ``place``."""
    every = questions(plan.questions + plan.fixed)[plan.questions :]
    return _sampled(plan, place / "fixed.jsonl", model, every, 1.0, seed=1)


def task_texts(plan: RLPlan, place: Path, model: Policy) -> list[TokenRow]:
    """Return ``answers_each`` completions for each question of the runs, stored in ``place``.

    Those of one question are adjacent.
    """
    every = [row for row in questions(plan.questions) for _ in range(plan.answers_each)]
    return _sampled(plan, place / "task.jsonl", model, every, 1.0, seed=2)


def planted_texts(
    plan: RLPlan, place: Path, model: Policy, seed: int, temperature: float, count: int
) -> list[TokenRow]:
    """Return ``count`` completions at a temperature, to questions in an order that depends on the seed."""
    every = questions(len(KINDS) * len(THINGS), seed=1 + seed)
    asked = [every[i % len(every)] for i in range(count)]
    path = place / f"planted-{seed}-{temperature:g}.jsonl"
    return _sampled(plan, path, model, asked, temperature, seed=100 + seed)


def _sampled(
    plan: RLPlan, path: Path, model: Policy, asked: Sequence[dict[str, str]], temperature: float, seed: int
) -> list[TokenRow]:
    if not path.is_file():
        encode = chat_encoder(model.tokenizer)
        prompts = []
        for index, row in enumerate(asked):
            text, ids = encode(row["question"])
            prompts.append(Prompt(index=index, task="short_sentence", text=text, token_ids=ids, item=dict(row)))
        sampling = SamplingConfig(temperature=temperature, max_new_tokens=plan.max_new_tokens)
        data = DataConfig(slots=min(32, len(prompts)), max_length=plan.max_length, sampling=sampling)
        answers = run_engine(model, prompts, data, PLAIN, seed, path.stem)
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.new")  # another share may write the same file
        write_corpus(token_rows(prompts, answers), scratch)
        scratch.replace(path)
    return read_corpus(path)
