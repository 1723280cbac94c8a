"""Prompts and rollouts of the study: completions of the model at a low temperature by the embedded engine.

What a shard holds depends on the form and the shard's number alone. So a shard that was lost in a stop is sampled again
with the same tokens, on a machine that rounds the same way. The first shards of the CPU form are kept in ``STORED``,
whose tokens count wherever the study is carried out.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm import tqdm

from bebop.adaptation.corpus import backbone_states, sampling_params
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Completion
from recipes.reproduce.real.corpus import Answer, read_shard, write_shard
from recipes.reproduce.real.prompts import RealPrompt, make_prompts
from recipes.reproduce.real.states import read_states, write_states
from recipes.reproduce.real_regime.plan import TRAINED_AT, Form

STORED = Path(__file__).parent / "stored.npz"
TRAIN, TEST = 1, 2  # streams of seeds
FIELDS = ("number", "kind", "split", "token_ids")
Asked = tuple[RealPrompt, int, float]  # a prompt, the seed of its completion, the temperature


def kept_prompts(form: Form, place: Path, policy: Policy) -> list[RealPrompt]:
    """Return the prompts of a form, made once and kept in ``place``."""
    path = place / "prompts.jsonl"
    if not path.is_file():
        write_prompts(path, make_prompts(form.plan, policy))
    return read_prompts(path)


def write_prompts(path: Path, prompts: Sequence[RealPrompt]) -> None:
    """Write prompts as token ids, whole or not at all: a machine that only decodes lacks what makes them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    scratch.write_text("".join(json.dumps({n: getattr(p, n) for n in FIELDS}) + "\n" for p in prompts))
    scratch.replace(path)


def read_prompts(path: Path) -> list[RealPrompt]:
    """Return prompts as ``write_prompts`` wrote them, without their text.

    Raises:
        UserError: The file is missing, or a line of it is no prompt.
    """
    if not path.is_file():
        raise UserError(
            f"{path} is not there: make it with python -m recipes.reproduce.real_regime --write-prompts FILE"
        )
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            prompts.append(RealPrompt(**(row | {"token_ids": tuple(row["token_ids"]), "text": ""})))
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}, line {number} is no prompt: it needs {', '.join(FIELDS)}") from error
    return prompts


def of_split(prompts: Sequence[RealPrompt], split: str, most: int | None = None) -> list[RealPrompt]:
    """Return the first ``most`` prompts of a split; kinds are mixed.

    Raises:
        UserError: There is none.
    """
    found = [prompt for prompt in prompts if prompt.split == split][:most]
    if not found:
        raise UserError(f"the prompts have none of the split {split!r}: give the file of --write-prompts")
    return found


def train_requests(form: Form, prompts: Sequence[RealPrompt], shard: int, temperature: float) -> list[Asked]:
    """Return what a shard asks: prompts in turn, each of its completions with a seed of its own."""
    train = of_split(prompts, "train")
    numbers = range(shard * form.shard, (shard + 1) * form.shard)
    return [(train[i % len(train)], (TRAIN << 40) + i, temperature) for i in numbers]


def test_requests(prompts: Sequence[RealPrompt], temperature: float) -> list[Asked]:
    """Return what a text of the evaluation asks: each prompt once."""
    return [(prompt, (TEST << 40) + prompt.number, temperature) for prompt in prompts]


def make_engine(form: Form, policy: Policy) -> TorchEngine:
    """Return the engine of all rollouts of a form, which decodes without drafts; its caches are made once."""
    length = form.plan.max_prompt_tokens + form.plan.max_new_tokens
    plain = DecodingConfig(system="autoregressive", draft_tokens=0)
    return TorchEngine(policy, plain, slots=form.slots, max_length=length, measure=False)


def sample(form: Form, engine: TorchEngine, asked: Sequence[Asked], bar: tqdm) -> list[Answer]:
    """Return a completion for each request, in order, decoded side by side."""
    for i, (prompt, seed, temperature) in enumerate(asked):
        sampling = SamplingConfig(max_new_tokens=form.plan.max_new_tokens, temperature=temperature)
        engine.add(Request(id=i, token_ids=prompt.token_ids, params=sampling_params(engine.policy, sampling, seed)))
    done: dict[int, Completion] = {}
    while engine.unfinished:
        ended = engine.step()
        done |= {finished.id: finished.completion for finished in ended}
        bar.update(len(ended))
    return [_answer(prompt, seed, done[i]) for i, (prompt, seed, _) in enumerate(asked)]


def _answer(prompt: RealPrompt, seed: int, completion: Completion) -> Answer:
    tokens, logprobs = completion.token_ids.tolist(), completion.logprobs.tolist()
    return _of(prompt, seed, completion.finish_reason, tokens, logprobs)


def _of(prompt: RealPrompt, seed: int, finish: str, tokens: Sequence[int], logprobs: Sequence[float] = ()) -> Answer:
    return Answer(
        number=prompt.number, kind=prompt.kind, split=prompt.split, seed=seed, finish=finish,
        prompt=prompt.token_ids, answer=tuple(tokens), logprobs=tuple(logprobs),
    )  # fmt: skip


def pack(form: Form, shards: Sequence[Sequence[Answer]], path: Path) -> None:
    """Write the first shards of a form as tokens, lengths and reasons for the end: what is no function of the form."""
    answers = [answer for shard in shards for answer in shard]
    np.savez_compressed(
        path,
        form=np.array(repr(form)),
        tokens=np.array([token for answer in answers for token in answer.answer], dtype=np.uint16),
        lengths=np.array([len(answer.answer) for answer in answers], dtype=np.uint16),
        stopped=np.array([answer.finish == "stop" for answer in answers]),
    )


def stored(form: Form, prompts: Sequence[RealPrompt], shard: int, path: Path) -> list[Answer] | None:
    """Return a shard that ``pack`` wrote, without log-probs; None where it is not there, or is another form's."""
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as found:
        lengths = found["lengths"]
        if str(found["form"]) != repr(form) or (shard + 1) * form.shard > len(lengths):
            return None
        begins = np.concatenate([[0], lengths.cumsum(dtype=np.int64)])
        tokens, stopped = found["tokens"], found["stopped"]
    asked = train_requests(form, prompts, shard, TRAINED_AT)
    return [
        _of(prompt, seed, "stop" if stopped[i] else "length", tokens[begins[i] : begins[i + 1]].tolist())
        for i, (prompt, seed, _) in enumerate(asked, shard * form.shard)
    ]


def sampled(form: Form, engine: TorchEngine, asked: Sequence[Asked], path: Path | None, label: str) -> list[Answer]:
    """Return completions that are kept in ``path``, sampled now unless they are there; None keeps nothing."""
    if path is not None and path.is_file():
        return read_shard(path)
    with tqdm(total=len(asked), desc=label, unit="completion", leave=False) as bar:
        answers = sample(form, engine, asked, bar)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_shard(path, answers)
    return answers


def kept_shard(form: Form, engine: TorchEngine, prompts: Sequence[RealPrompt], place: Path, shard: int) -> list[Answer]:
    """Return the completions of a shard: stored ones, or those kept on disk where the form is resumable."""
    if (known := stored(form, prompts, shard, STORED)) is not None:
        return known
    asked = train_requests(form, prompts, shard, TRAINED_AT)
    return sampled(form, engine, asked, shard_path(form, place, shard), "rollouts")


def shard_path(form: Form, place: Path, shard: int) -> Path | None:
    """Return where a shard is kept; None where the form is not resumable."""
    return place / "rollouts" / f"shard-{shard:04d}.jsonl" if form.resumable else None


def kept_states(form: Form, model: Policy, rows: Sequence[TokenRow], path: Path | None) -> Sequence[Tensor]:
    """Return the backbone's states [P + T, d] of each row, kept beside the rollouts for other processes."""
    file = None if path is None else path.with_suffix(".npy")
    if file is None or not file.is_file():
        states = backbone_states(model, rows, form.states_batch)
        if file is None:
            return states
        write_states(file, states)
    # The file is in fp32, which holds every number of the model's type.
    return [one.to(model.backbone.dtype) for one in read_states(file, [len(row.token_ids) for row in rows])]
