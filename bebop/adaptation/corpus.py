"""Sequences to train a head on: answers sampled by the model itself, or text from a file; kept as JSONL."""

import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config import DecodingConfig, SamplingConfig
from bebop.config_adapt import AdaptConfig, DataConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.tasks.files import read_rows
from bebop.tasks.source import PromptSource, chat_encoder, instruction
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Completion, Prompt, SamplingParams

CORPUS = "corpus.jsonl"  # of a run folder
HELD_OUT_SEED = 7_919  # added to the task's seed: another stream of questions
MAX_TRIES = 20  # held-out candidates per place that occur in the training prompts before one is taken all the same


def params(policy: Policy, sampling: SamplingConfig, seed: int) -> SamplingParams:
    """The sampling distribution of a configuration for one request."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens", "stop")
    chosen: dict[str, Any] = {name: getattr(sampling, name) for name in names}
    return SamplingParams(**chosen, stop_token_ids=policy.eos_token_ids, seed=seed)


def run_engine(
    policy: Policy,
    prompts: Sequence[Prompt],
    data: DataConfig,
    decoding: DecodingConfig,
    seed: int = 0,
    label: str | None = None,
    ranks: Ranks = ALONE,
    sampling: SamplingConfig | None = None,
    keep_state: bool = False,
) -> list[Completion]:
    """An answer to each prompt, in their order; each rank decodes its share. ``label`` None shows no progress bar.

    ``sampling``: other than that of the data; ``keep_state``: with what the decoding system kept of each answer.
    """
    engine = TorchEngine(policy, decoding, slots=data.slots, max_length=data.max_length, keep_state=keep_state)
    mine = range(ranks.rank, len(prompts), ranks.world)
    for i in mine:
        own = params(policy, sampling or data.sampling, (seed << 40) + i)
        engine.add(Request(id=i, token_ids=prompts[i].token_ids, params=own))
    done: dict[int, Completion] = {}
    with tqdm(total=len(mine), desc=label, unit="answer", disable=label is None or ranks.rank > 0) as bar:
        while engine.unfinished:
            ended = engine.step()
            done |= {f.id: f.completion for f in ended}
            bar.update(len(ended))
    done = ranks.union(done)
    return [done[i] for i in range(len(prompts))]


def drafting(policy: Policy, system: str = "bebop", draft_tokens: int = 3) -> DecodingConfig:
    """A decoding system, or plain decoding where there is no head: the distribution of the answers is the same."""
    if policy.mtp is None:
        return DecodingConfig(system="autoregressive", draft_tokens=0)
    return DecodingConfig(system=system, draft_tokens=draft_tokens)


def token_rows(prompts: Sequence[Prompt], answers: Sequence[Completion]) -> list[TokenRow]:
    """Prompts with their answers as text to train on."""
    return [
        TokenRow(prompt=p.token_ids, answer=tuple(a.token_ids.tolist()), task=p.task)
        for p, a in zip(prompts, answers, strict=True)
    ]


def question_streams(config: AdaptConfig, policy: Policy) -> tuple[list[Prompt], list[Prompt]]:
    """Prompts to train on and held-out ones, which do not occur among them as far as the task has that many."""
    room = config.data.max_length - config.data.sampling.max_new_tokens
    encode = chat_encoder(policy.tokenizer, instruction(config.task, policy.tokenizer))
    source = PromptSource(config.task, encode, room)
    training = [source.prompt(i) for i in range(config.data.sequences)]
    other = dataclasses.replace(config.task, seed=config.task.seed + HELD_OUT_SEED, size=None)
    fresh, known = PromptSource(other, encode, room), {p.token_ids for p in training}
    held_out: list[Prompt] = []
    for place in range(config.evaluation.prompts):
        tries = (fresh.prompt(place * MAX_TRIES + i) for i in range(MAX_TRIES))
        first = next(tries)
        held_out.append(
            first if first.token_ids not in known else next((p for p in tries if p.token_ids not in known), first)
        )
    return training, held_out


def sampled(
    config: AdaptConfig,
    policy: Policy,
    folder: Path,
    decoding: DecodingConfig,
    label: str | None,
    ranks: Ranks = ALONE,
) -> tuple[list[Prompt], list[TokenRow], list[Prompt]]:
    """Prompts to train on, the model's answers to them, and held-out prompts. The answers are kept in the run folder,
    for a resume and for others; rank 0 writes."""
    path = folder / CORPUS
    training, held_out = question_streams(config, policy)
    if config.resume and path.is_file():
        return training, read_back(path), held_out
    rows = token_rows(training, run_engine(policy, training, config.data, decoding, config.seed, label, ranks))
    if ranks.rank == 0:
        with writing(path):
            keep(rows, path)
    return training, rows, held_out


def from_file(data: DataConfig, policy: Policy) -> list[TokenRow]:
    """Rows of a file: token ids (``prompt_ids``, ``answer_ids``), or a prompt and an answer as text."""
    rows = read_rows(Path(str(data.path)), "data.path")
    encode = chat_encoder(policy.tokenizer)
    read = [_row(row, where, data, policy, encode) for where, row in rows[: data.sequences or None]]
    kept = [row for row in read if len(row.answer) > 0 and len(row.token_ids) <= data.max_length]
    if not kept:
        raise UserError(
            f"data.path={data.path!r}: none of its {len(read)} rows has an answer and at most "
            f"data.max_length={data.max_length} tokens"
        )
    return kept


def _row(row: dict[str, Any], where: str, data: DataConfig, policy: Policy, encode: Any) -> TokenRow:
    """One row of a file as tokens; the end-of-text token is part of the answer."""
    if "prompt_ids" in row and "answer_ids" in row:
        if not (_token_ids(row["prompt_ids"]) and _token_ids(row["answer_ids"])):
            raise UserError(f"data.path={data.path!r}: {where} has token ids that are no whole numbers from 0 on")
        token_row = TokenRow(
            prompt=tuple(row["prompt_ids"]), answer=tuple(row["answer_ids"]), task=str(row.get("task", "file"))
        )
    else:
        missing = [key for key in (data.prompt_key, data.answer_key) if row.get(key) is None]
        if missing:
            raise UserError(
                f"data.path={data.path!r}: {where} has no {missing[0]!r}; it has {', '.join(map(str, row))}"
            )
        answer = policy.tokenizer.encode(str(row[data.answer_key]), add_special_tokens=False)
        end = policy.tokenizer.eos_token_id
        token_row = TokenRow(
            prompt=encode(row[data.prompt_key])[1],
            answer=(*answer, *([end] if isinstance(end, int) else [])),
            task=str(row.get("task", "file")),
        )
    largest = max(token_row.token_ids, default=0)
    if largest >= policy.vocab_size or not token_row.prompt:
        problem = f"token {largest}, the model has {policy.vocab_size}" if token_row.prompt else "an empty prompt"
        raise UserError(f"data.path={data.path!r}: {where} has {problem}")
    return token_row


def _token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(x) is int and x >= 0 for x in value)


def keep(rows: Iterable[TokenRow], path: Path) -> None:
    """Write rows as JSONL, whole or not at all; ``from_file`` reads them."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    lines = (json.dumps({"prompt_ids": r.prompt, "answer_ids": r.answer, "task": r.task}) + "\n" for r in rows)
    scratch.write_text("".join(lines), encoding="utf-8")
    scratch.replace(path)


def read_back(path: Path) -> list[TokenRow]:
    """Rows as ``keep`` wrote them."""
    rows = [row for _, row in read_rows(path, "corpus")]
    return [TokenRow(prompt=tuple(r["prompt_ids"]), answer=tuple(r["answer_ids"]), task=r["task"]) for r in rows]
