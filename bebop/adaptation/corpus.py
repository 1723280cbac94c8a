"""Sequences to train a head on: answers sampled by the model itself, or text from a file; kept as JSONL."""

import dataclasses
import itertools
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
from bebop.tasks.files import check_row, lookup, read_rows
from bebop.tasks.source import PromptSource, chat_encoder, instruction
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Completion, Prompt, SamplingParams

CORPUS = "corpus.jsonl"  # of a run folder
HELD_OUT_SEED = 7_919  # added to the task's seed: another stream of questions
MAX_TRIES = 20  # candidates for a held-out place that are trained on, or held out, before it stays empty
FEWEST = 2  # prompts that are held out: intervals need two
TOO_FEW = ": give 10 or more, as a fifth is held out"


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
    """Prompts to train on, and other ones that are held out: all different, and none of them is trained on.

    A task with questions to spare gives ``evaluation.prompts`` of those that training does not ask. One that has no
    more than training asks has up to a fifth of its questions held out, and training asks the rest again.
    ``UserError`` where that are fewer than two.
    """
    room = config.data.max_length - config.data.sampling.max_new_tokens
    encode = chat_encoder(policy.tokenizer, instruction(config.task, policy.tokenizer))
    source, wanted = PromptSource(config.task, encode, room), config.data.sequences
    training = [source.prompt(i) for i in range(wanted)]
    other = dataclasses.replace(config.task, seed=config.task.seed + HELD_OUT_SEED, size=None)
    fresh, known = PromptSource(other, encode, room), {p.token_ids: p for p in training}
    held_out: dict[tuple[int, ...], Prompt] = {}
    for place in range(config.evaluation.prompts):
        tries = (fresh.prompt(place * MAX_TRIES + i) for i in range(MAX_TRIES))
        new = next((p for p in tries if p.token_ids not in known and p.token_ids not in held_out), None)
        held_out |= {} if new is None else {new.token_ids: new}
    count = _held_out_count(config, len(known) + len(held_out))
    taken = [*known][len(known) - max(0, count - len(held_out)) :]
    held_out |= {ids: known[ids] for ids in taken}
    if len(held_out) < FEWEST:
        what = f"task.path={config.task.path!r}" if config.task.source == "file" else f"task.name={config.task.name!r}"
        raise UserError(f"{what} has {len({*known, *held_out})} different questions{TOO_FEW}")
    if taken:
        others = (p for i in itertools.count() if (p := source.prompt(i)).token_ids not in held_out)
        training = list(itertools.islice(others, wanted))
    return training, [*held_out.values()]


def split_rows(config: AdaptConfig, rows: Sequence[TokenRow]) -> tuple[list[TokenRow], list[TokenRow]]:
    """Rows of a file to train on, and held-out ones: those of its last prompts, of which they are up to a fifth.

    No prompt is on both sides. ``UserError`` for fewer than ten prompts.
    """
    prompts = [*dict.fromkeys(row.prompt for row in reversed(rows))]
    held_out = {*prompts[: _held_out_count(config, len(prompts))]}
    if len(held_out) < FEWEST:
        found = f"{len(prompts)} different prompts in {len(rows)} usable rows"
        raise UserError(f"data.path={config.data.path!r} has {found}{TOO_FEW}")
    return [row for row in rows if row.prompt not in held_out], [row for row in rows if row.prompt in held_out]


def _held_out_count(config: AdaptConfig, questions: int) -> int:
    """How many of so many are held out where training would ask them all: a fifth, or what is wanted."""
    return min(config.evaluation.prompts, questions // 5)


def sampled(
    config: AdaptConfig,
    policy: Policy,
    folder: Path,
    decoding: DecodingConfig,
    label: str | None,
    ranks: Ranks = ALONE,
    streams: tuple[list[Prompt], list[Prompt]] | None = None,
) -> tuple[list[Prompt], list[TokenRow], list[Prompt]]:
    """Prompts to train on, the model's answers to them, and held-out prompts. The answers are kept in the run folder,
    for a resume and for others; rank 0 writes. ``streams``: what ``question_streams`` gave, if that is known."""
    path = folder / CORPUS
    training, held_out = streams or question_streams(config, policy)
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
        check_row(row, data.prompt_key, data.answer_key, "data", where)
        text = str(lookup(row, data.answer_key, "data.answer_key", where))
        answer = policy.tokenizer.encode(text, add_special_tokens=False)
        end = policy.tokenizer.eos_token_id
        token_row = TokenRow(
            prompt=encode(lookup(row, data.prompt_key, "data.prompt_key", where))[1],
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
