"""Sequences to train a head on: completions of the model itself or text from a file, stored as JSONL."""

import dataclasses
import gc
import itertools
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

from bebop.adaptation.ranks import ALONE, Ranks
from bebop.adaptation.served import ServedEngines, engine_errors
from bebop.command import writing
from bebop.config.adapt import SERVED, AdaptConfig, DataConfig
from bebop.config.fields import MAX_SEED
from bebop.config.job import DecodingConfig, SamplingConfig, TaskConfig
from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.model.parity import stock_attention
from bebop.rollout.agent_setup import make_agent_loop
from bebop.rollout.engine import Engine, Finished, Request
from bebop.rollout.engine_thread import EngineThread
from bebop.rollout.torch_engine import TorchEngine
from bebop.run_dir.safe_parse import parse_json
from bebop.tasks.files import check_row, lookup, read_rows
from bebop.tasks.source import EnvironmentSource, PromptSource, chat_encoder, instruction
from bebop.trainer.chains import TokenRow, chain_rows
from bebop.trajectory import Completion, Prompt, SamplingParams, Trajectory

STOCK_TOKENS = 1 << 15  # tokens in one forward pass on transformers' attention
CORPUS = "corpus.jsonl"  # in the run folder
HELD_OUT = "held_out.jsonl"  # completions of the prompts that are held out
HELD_OUT_SEED = 7_919  # added to the task's seed: another stream of questions
MAX_TRIES = 20  # questions tried for one held-out place before it stays empty
MIN_HELD_OUT = 2  # held-out prompts: intervals need two
TOO_FEW = ": give 10 or more, as a fifth is held out"
Answer = tuple[Prompt, Completion]  # a turn, with all tokens before it as its prompt


def sampling_params(policy: Policy, sampling: SamplingConfig, seed: int) -> SamplingParams:
    """Return the sampling parameters of one request, from a sampling configuration and a seed."""
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
    """Return a completion of each prompt, in order; each rank decodes its share.

    Args:
        label: the label of the progress bar; None shows no bar.
        sampling: replaces the sampling configuration of ``data``.
        keep_state: also return the state that the decoding system kept of each completion.
    """
    engine = _engine(policy, decoding, data, keep_state)
    mine = range(ranks.rank, len(prompts), ranks.world)
    asked = requests(policy, prompts, mine, sampling or data.sampling, seed)
    with progress(len(mine), label, ranks) as bar:
        done = ranks.union({f.id: f.completion for f in decoded(engine, asked, bar)})
    return [done[i] for i in range(len(prompts))]


def _engine(policy: Policy, decoding: DecodingConfig, data: DataConfig, keep_state: bool = False) -> TorchEngine:
    """Return a new engine. On a GPU the caches of the one before are freed first: drafter and cache hold each other."""
    if policy.device.type == "cuda":  # a collection takes a third of a second where much has been imported
        gc.collect()
    return TorchEngine(policy, decoding, slots=data.slots, max_length=data.max_length, keep_state=keep_state)


def requests(
    policy: Policy, prompts: Sequence[Prompt], chosen: Iterable[int], sampling: SamplingConfig, seed: int
) -> list[Request]:
    """Return requests for the chosen prompts; each seed depends on the prompt's number."""
    return [
        Request(
            id=i, token_ids=prompts[i].token_ids, params=sampling_params(policy, sampling, (seed % MAX_SEED << 40) + i)
        )
        for i in chosen
    ]


def decoded(engine: Engine, asked: Sequence[Request], bar: tqdm) -> Iterator[Finished]:
    """Yield the completions of requests as they end."""
    for request in asked:
        engine.add(request)
    while engine.unfinished:
        for finished in engine.step():
            bar.update()
            yield finished


def progress(count: int, label: str | None, ranks: Ranks, unit: str = "completion") -> tqdm:
    """Return the progress bar of rank 0; ``label`` None shows none."""
    return tqdm(total=count, desc=label, unit=unit, disable=label is None or ranks.rank > 0)


def engine_name(data: DataConfig, policy: Policy) -> str:
    """Return the name of the engine that samples completions, as ``data.engine`` spells it."""
    return data.engine or ("transformers" if policy.stock else "torch")


def sampled_rows(
    policy: Policy,
    prompts: Sequence[Prompt],
    data: DataConfig,
    decoding: DecodingConfig,
    seed: int = 0,
    label: str | None = None,
    ranks: Ranks = ALONE,
    served: ServedEngines | None = None,
    parts: "Parts | None" = None,
) -> list[TokenRow]:
    """Return each prompt with a completion of the model, by the engine that ``data.engine`` names.

    Args:
        policy: the model.
        prompts: the prompts to complete; each rank samples its share.
        data: engine, sampling distribution and sizes.
        decoding: drafting of the embedded engine; the other engines sample without drafts.
        seed: seed of the draws.
        label: label of the progress bar; None shows no bar.
        ranks: the processes of the adaptation.
        served: engines to sample with where ``data.engine`` is SGLang or vLLM.
        parts: store of completions as they end; completions in it are not sampled again.

    Raises:
        UserError: SGLang or vLLM refuses the model, or ends.
    """
    known = parts.read(ranks) if parts is not None else {}
    mine = [i for i in range(len(prompts)) if i not in known][ranks.rank :: ranks.world]
    done = {}
    with progress(len(mine), label, ranks) as bar, parts.writer(ranks) if parts else nullcontext(None) as keep:
        for i, ids in _sampled(policy, prompts, mine, data, decoding, seed, bar, served, len(known)):
            done[i] = ids
            if keep is not None:
                keep(i, ids)
    done = known | ranks.union(done)
    return [TokenRow(prompt=p.token_ids, answer=done[i], task=p.task) for i, p in enumerate(prompts)]


def _sampled(
    policy: Policy,
    prompts: Sequence[Prompt],
    chosen: Sequence[int],
    data: DataConfig,
    decoding: DecodingConfig,
    seed: int,
    bar: tqdm,
    served: ServedEngines | None,
    drawn: int,
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield the completions of the chosen prompts as they end, each with its prompt's number.

    ``drawn``: the number of completions that an earlier process has sampled.
    """
    name = engine_name(data, policy)
    if name == "transformers":
        yield from _generate(policy, prompts, chosen, data, seed, bar)
        return
    if not chosen:
        return  # no engine is started for nothing
    asked = requests(policy, prompts, chosen, data.sampling, seed)
    with engine_errors(data):
        if name in SERVED:
            assert served is not None
            engine: Engine = served.engine(drawn)
        else:
            engine = _engine(policy, decoding, data)
        for finished in decoded(engine, asked, bar):
            yield finished.id, tuple(finished.completion.token_ids.tolist())


@torch.no_grad()
def _generate(
    policy: Policy, prompts: Sequence[Prompt], chosen: Sequence[int], data: DataConfig, seed: int, bar: tqdm
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Yield completions by transformers' ``generate``, each with its prompt's number.

    Only prompts of one length share a batch: other prompts need padding on the left, which recurrent layers would read.
    """
    ends, sampling = policy.eos_token_ids, data.sampling
    pad = ends[0] if ends else 0
    # Name every setting that changes the distribution: generate takes the others from the model's own settings,
    # which are set aside below.
    wanted = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
        max_new_tokens=sampling.max_new_tokens, eos_token_id=list(ends) or None, pad_token_id=pad, use_cache=True,
    )  # fmt: skip
    by_length = sorted(chosen, key=lambda i: len(prompts[i].token_ids))
    own, policy.backbone.generation_config = policy.backbone.generation_config, GenerationConfig()
    gpus = [policy.device] if policy.device.type == "cuda" else []
    try:
        for _, alike in itertools.groupby(by_length, key=lambda i: len(prompts[i].token_ids)):
            group = [*alike]
            for part in (group[start : start + data.slots] for start in range(0, len(group), data.slots)):
                ids = torch.tensor([prompts[i].token_ids for i in part], device=policy.device)
                with torch.random.fork_rng(devices=gpus), stock_attention(policy.backbone, "sdpa"):
                    # PyTorch's generator on a CPU takes 32 bits of a seed.
                    torch.manual_seed(random.Random(f"{seed}/{part[0]}").getrandbits(32))
                    out = policy.backbone.generate(ids, attention_mask=torch.ones_like(ids), generation_config=wanted)
                for i, row in zip(part, out[:, ids.shape[1] :].tolist(), strict=True):
                    end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
                    bar.update()
                    yield i, tuple(row[:end])
    finally:
        policy.backbone.generation_config = own


def drafting_config(policy: Policy, system: str = "bebop", draft_tokens: int = 3) -> DecodingConfig:
    """Return the configuration of a decoding system, or of plain decoding where there is no head.

    Both give completions of the same distribution.
    """
    if policy.mtp is None:
        return DecodingConfig(system="autoregressive", draft_tokens=0)
    return DecodingConfig(system=system, draft_tokens=draft_tokens)


def token_rows(prompts: Sequence[Prompt], answers: Sequence[Completion]) -> list[TokenRow]:
    """Return the prompts with their completions as rows to train on."""
    return [
        TokenRow(prompt=p.token_ids, answer=tuple(a.token_ids.tolist()), task=p.task)
        for p, a in zip(prompts, answers, strict=True)
    ]


def question_streams(config: AdaptConfig, policy: Policy) -> tuple[list[Prompt], list[Prompt]]:
    """Return the prompts to train on and the held-out prompts. Held-out prompts are distinct and never trained on.

    A task with enough questions gives ``evaluation.prompts`` questions that training does not ask. Any other task holds
    out up to a fifth of its questions, and training asks the rest repeatedly.

    Raises:
        UserError: Fewer than two questions can be held out.
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
    if len(held_out) < MIN_HELD_OUT:
        what = f"task.path={config.task.path!r}" if config.task.source == "file" else f"task.name={config.task.name!r}"
        raise UserError(f"{what} has {len({*known, *held_out})} different questions{TOO_FEW}")
    if taken:
        others = (p for i in itertools.count() if (p := source.prompt(i)).token_ids not in held_out)
        training = list(itertools.islice(others, wanted))
    return training, [*held_out.values()]


def split_rows(config: AdaptConfig, rows: Sequence[TokenRow]) -> tuple[list[TokenRow], list[TokenRow]]:
    """Return the rows of a file to train on and the held-out rows: those of its last prompts, up to a fifth of them.

    No prompt is on both sides.

    Raises:
        UserError: The file has fewer than ten prompts.
    """
    prompts = [*dict.fromkeys(row.prompt for row in reversed(rows))]
    held_out = {*prompts[: _held_out_count(config, len(prompts))]}
    if len(held_out) < MIN_HELD_OUT:
        found = f"{len(prompts)} different prompts in {len(rows)} usable rows"
        raise UserError(f"data.path={config.data.path!r} has {found}{TOO_FEW}")
    return [row for row in rows if row.prompt not in held_out], [row for row in rows if row.prompt in held_out]


def _held_out_count(config: AdaptConfig, questions: int) -> int:
    """Return how many of ``questions`` are held out where training would ask them all: at most a fifth."""
    return min(config.evaluation.prompts, questions // 5)


def sample_corpus(
    config: AdaptConfig,
    policy: Policy,
    folder: Path,
    decoding: DecodingConfig,
    label: str | None,
    ranks: Ranks = ALONE,
    streams: tuple[list[Prompt], list[Prompt]] | None = None,
    served: ServedEngines | None = None,
) -> tuple[list[Prompt], list[TokenRow], list[Prompt]]:
    """Return the prompts to train on, the model's completions, and held-out prompts.

    The completions are stored in the run folder, for a resumed run and for other runs.

    Args:
        streams: the result of ``question_streams`` if it is known.
        served: as in ``sampled_rows``; with None this function starts an engine and ends it.
    """
    training, held_out = streams or question_streams(config, policy)
    rows = kept_rows(config, policy, training, folder / CORPUS, decoding, config.seed, label, ranks, served)
    return training, rows, held_out


def kept_rows(
    config: AdaptConfig,
    policy: Policy,
    prompts: Sequence[Prompt],
    path: Path,
    decoding: DecodingConfig,
    seed: int,
    label: str | None,
    ranks: Ranks = ALONE,
    served: ServedEngines | None = None,
) -> list[TokenRow]:
    """Return the rows in a file of the run folder; sample the missing rows first. Rank 0 writes the file."""
    if config.resume and path.is_file():
        return read_corpus(path)
    parts = Parts(path, config.resume)
    with closing(ServedEngines(config, ranks)) if served is None else nullcontext(served) as engines:
        rows = sampled_rows(policy, prompts, config.data, decoding, seed, label, ranks, engines, parts)
    if ranks.rank == 0:
        with writing(path):
            write_corpus(rows, path)
            parts.remove()
    return rows


class Parts:
    """Completions of a corpus during its sampling: one file a rank beside the corpus, with one completion a line.

    A resumed run continues from these files. Only ranks that can reach the run folder write their completions.
    """

    def __init__(self, path: Path, resume: bool) -> None:
        """Store the settings.

        Args:
            path: the file of the whole corpus.
            resume: whether to use the completions that an earlier process stored.
        """
        self.path, self.resume = path, resume

    def files(self) -> list[Path]:
        """Return the existing part files, sorted."""
        return sorted(self.path.parent.glob(f"{self.path.stem}.part*.jsonl"))

    def read(self, ranks: Ranks) -> dict[int, tuple[int, ...]]:
        """Return the stored completions by prompt number, on every rank; rank 0 merges them into one file."""
        known: dict[int, tuple[int, ...]] = {}
        if ranks.rank == 0:
            for file in self.files() if self.resume else []:
                for line in file.read_bytes().splitlines():
                    with suppress(ValueError, KeyError, TypeError):  # the process ended while it wrote this one
                        row = parse_json(line)
                        known[int(row["number"])] = tuple(map(int, row["answer_ids"]))
            with writing(self.path):
                self.remove()
                scratch = self._file(0).with_suffix(".new")
                scratch.write_text("".join(_line(i, ids) for i, ids in known.items()), encoding="utf-8")
                scratch.replace(self._file(0))
        return ranks.union({0: known} if ranks.rank == 0 else {})[0]

    @contextmanager
    def writer(self, ranks: Ranks) -> Iterator[Callable[[int, tuple[int, ...]], None] | None]:
        """Yield a function that stores one more completion of this rank, or None where there is no run folder."""
        if not self.path.parent.is_dir():
            yield None
            return
        with writing(self.path), self._file(ranks.rank).open("a", encoding="utf-8", buffering=1) as file:
            yield lambda number, ids: print(_line(number, ids), end="", file=file)

    def remove(self) -> None:
        """Remove the files."""
        for file in self.files():
            file.unlink()

    def _file(self, rank: int) -> Path:
        return self.path.with_name(f"{self.path.stem}.part{rank}.jsonl")


def _line(number: int, ids: tuple[int, ...]) -> str:
    return json.dumps({"number": number, "answer_ids": ids}) + "\n"


def begun(folder: Path) -> bool:
    """Return whether a run folder holds what a run without a checkpoint can resume from.

    That is a complete or partial corpus, or a finished size of a sweep of block sizes.
    """
    corpora = (one.is_file() or Parts(one, True).files() for one in (folder / CORPUS, folder / HELD_OUT))
    return any(corpora) or any(folder.glob("sweep-*.json"))


def from_file(data: DataConfig, policy: Policy) -> list[TokenRow]:
    """Return the rows of a file: token ids (``prompt_ids``, ``answer_ids``), or a prompt and an answer as text."""
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
    """Return one row of a file as tokens; the end-of-text token is part of the completion."""
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


def write_corpus(rows: Iterable[TokenRow], path: Path) -> None:
    """Write rows as JSONL atomically; ``from_file`` reads them."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}.new")
    lines = (json.dumps({"prompt_ids": r.prompt, "answer_ids": r.answer, "task": r.task}) + "\n" for r in rows)
    scratch.write_text("".join(lines), encoding="utf-8")
    scratch.replace(path)


def read_corpus(path: Path) -> list[TokenRow]:
    """Return the rows of a file that ``write_corpus`` wrote."""
    rows = [row for _, row in read_rows(path, "corpus")]
    return [TokenRow(prompt=tuple(r["prompt_ids"]), answer=tuple(r["answer_ids"]), task=r["task"]) for r in rows]


# ---- turns of the model with an environment: the prompt of a turn is all text before it


def sample_turns(
    config: AdaptConfig,
    policy: Policy,
    path: Path,
    decoding: DecodingConfig,
    label: str | None,
    ranks: Ranks = ALONE,
    served: ServedEngines | None = None,
) -> tuple[list[Prompt], list[TokenRow], list[Prompt]]:
    """Return the prompts to train on, the model's turns after them, and held-out prompts, as ``sample_corpus`` does."""
    other = dataclasses.replace(config.task, seed=config.task.seed + HELD_OUT_SEED, size=None)
    # Draws go by seed and tokens: with the seeds of the training games, a held-out one would begin as one of them.
    seed = (config.seed + HELD_OUT_SEED) % MAX_SEED
    wanted = config.evaluation.prompts
    held_out = [p for p, _ in play_turns(config, other, wanted, policy, decoding, None, ranks, seed, served)]
    if config.resume and path.is_file():
        rows = read_corpus(path)
        return [_prompt(i, row.prompt, row.task) for i, row in enumerate(rows)], rows, held_out
    answers = play_turns(config, config.task, config.data.sequences, policy, decoding, label, ranks, None, served)
    training = [p for p, _ in answers]
    rows = token_rows(training, [completion for _, completion in answers])
    if ranks.rank == 0:
        with writing(path):
            write_corpus(rows, path)
    return training, rows, held_out


def play_turns(
    config: AdaptConfig,
    task: TaskConfig,
    wanted: int,
    policy: Policy,
    decoding: DecodingConfig,
    label: str | None,
    ranks: Ranks = ALONE,
    seed: int | None = None,
    served: ServedEngines | None = None,
) -> list[Answer]:
    """Return the first ``wanted`` turns of trajectories 0, 1, ...; each rank plays its share of the trajectories.

    Args:
        seed: seed of the draws; None takes the configuration's.
        served: as in ``sampled_rows``.

    Raises:
        UserError: All trajectories are lost, or SGLang or vLLM refuses the model or ends.
    """
    data, source = config.data, EnvironmentSource(task)
    drawn = config.seed if seed is None else seed
    if data.engine in SERVED:
        assert served is not None
        with engine_errors(data):
            engine: Engine = served.engine()
    else:
        engine = _engine(policy, decoding, data)
    thread = EngineThread(engine)
    agents = make_agent_loop(config.model, task, data.max_length, thread, policy.eos_token_ids)
    answers: list[Answer] = []
    thread.start()
    agents.start()
    try:
        with engine_errors(data), progress(wanted, label, ranks, "turn") as bar:
            begun = 0
            while len(answers) < wanted:
                numbers = range(begun, begun + data.slots * ranks.world)
                begun = numbers.stop
                mine = [i for i in numbers if i % ranks.world == ranks.rank]
                playing = {
                    i: agents.play(source.prompt(i), sampling_params(policy, data.sampling, (drawn << 40) + i))
                    for i in mine
                }
                played = ranks.union({i: future.result() for i, future in playing.items()})
                there = [played[i] for i in numbers if played[i].trajectory is not None]
                if not there:
                    raise UserError(f"environment {task.name}: {len(numbers)} of {len(numbers)} trajectories were lost")
                new = [answer for one in there if one.trajectory for answer in answers_of(one.prompt, one.trajectory)]
                answers += new
                bar.update(min(len(new), wanted - bar.n))
    finally:
        agents.stop()
        thread.stop()
    return answers[:wanted]


def answers_of(prompt: Prompt, trajectory: Trajectory) -> list[Answer]:
    """Return each turn of a trajectory as a completion whose prompt is all earlier text."""
    before, answers = list(prompt.token_ids), list[Answer]()
    for turn in trajectory.turns:
        before += turn.observation.tolist()
        answers.append((dataclasses.replace(prompt, token_ids=tuple(before)), turn.completion))
        before += turn.completion.token_ids.tolist()
    return answers


def _prompt(index: int, token_ids: tuple[int, ...], task: str) -> Prompt:
    return Prompt(index=index, task=task, text="", token_ids=tuple(token_ids), item={})


# ---- the backbone's hidden states of a text: the backbone is frozen, so they are computed once if they fit


@torch.no_grad()
def backbone_states(
    policy: Policy, rows: Sequence[TokenRow], batch: int = 32, taps: Sequence[int] = ()
) -> list[Tensor]:
    """Return the final, normed hidden states [L, d] of each row; rows of similar length are computed together.

    ``taps``: layers whose states follow the final ones, which gives [L, (1 + T) d].
    """
    states: dict[int, Tensor] = {}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids))
    if policy.stock and rows:  # layers of experts and recurrent ones hold more for each token than attention
        batch = max(1, min(batch, STOCK_TOKENS // len(rows[order[-1]].token_ids)))
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        ids = chain_rows([rows[i] for i in part], 1, policy.device).token_ids
        with tapped(policy.backbone.get_decoder().layers, {*taps}) as layers:
            hidden = policy.hidden(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids), CausalContext())
        if taps:
            hidden = torch.cat([hidden, *(layers[tap] for tap in taps)], -1)
        states |= {i: hidden[place, : len(rows[i].token_ids)].clone() for place, i in enumerate(part)}
    return [states[i] for i in range(len(rows))]


def size_of_states(policy: Policy, rows: Sequence[TokenRow], taps: Sequence[int] = ()) -> int:
    """Return the size in bytes of the result of ``backbone_states``."""
    tokens = sum(len(row.token_ids) for row in rows)
    return tokens * (1 + len(taps)) * int(policy.backbone.config.hidden_size) * policy.backbone.dtype.itemsize
