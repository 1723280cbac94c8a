"""Completions of the model itself at temperature 1, sampled in shards with the embedded engine.

A shard depends only on the plan and its own number. A stopped corpus therefore continues where it was, with the same
result as without a stop. ``corpus/shard-0007.jsonl`` has one line per completion: prompt, completion, seed, log-probs.
"""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from bebop.adaptation.corpus import sampling_params
from bebop.bench.record import show
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Completion
from recipes.reproduce.cli import part_of
from recipes.reproduce.real.plan import Plan, agree, load, missing
from recipes.reproduce.real.prompts import RealPrompt, make_prompts


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Prompt with the model's completion.

    Example: Answer(number=812, kind="story", split="test", seed=812, ...).
    """

    number: int
    kind: str
    split: str
    seed: int  # of the request
    finish: str  # stop or length
    prompt: tuple[int, ...]  # [P]
    answer: tuple[int, ...]  # [T], the stop token included
    logprobs: tuple[float, ...]  # [T] log p of each token, by the engine

    @property
    def row(self) -> TokenRow:
        """Return the tokens as a training row, with the kind as its task."""
        return TokenRow(prompt=self.prompt, answer=self.answer, task=self.kind)


def shard_paths(folder: Path, plan: Plan) -> list[Path]:
    """Return the paths of all shards of the plan, sampled or not."""
    count = math.ceil(plan.prompts / plan.shard)
    return [folder / "corpus" / f"shard-{shard:04d}.jsonl" for shard in range(count)]


def make_corpus(folder: Path, plan: Plan, policy: Policy | None = None, share: tuple[int, int] = (1, 1)) -> None:
    """Sample the missing shards, and report tokens per second of processor time.

    ``share``: (i, n) takes every n-th shard from the i-th, for n processes side by side.

    Raises:
        UserError: The folder holds a corpus of another plan.
    """
    agree(folder / "corpus" / "plan.json", plan.as_dict(), "a corpus")
    paths = shard_paths(folder, plan)
    left = [shard for shard in part_of(range(len(paths)), share) if not paths[shard].is_file()]
    if not left:
        return
    policy = load(plan) if policy is None else policy
    prompts = make_prompts(plan, policy)
    tokens, began = 0, time.process_time()
    with tqdm(
        total=len(prompts), initial=len(prompts) - _answers(left, plan, prompts), desc="corpus", unit="answer"
    ) as bar:
        for shard in left:
            answers = sample_shard(plan, policy, prompts[shard * plan.shard : (shard + 1) * plan.shard], bar)
            write_shard(paths[shard], answers)
            tokens += sum(len(answer.answer) for answer in answers)
            bar.set_postfix_str(f"{tokens / (time.process_time() - began):.0f} tokens/CPU s", refresh=False)
    seconds = time.process_time() - began
    show(f"corpus: {tokens:,} tokens in {seconds:,.0f} s of processor time, {tokens / seconds:.0f} a second\n")


def _answers(shards: Sequence[int], plan: Plan, prompts: Sequence[RealPrompt]) -> int:
    return sum(len(prompts[shard * plan.shard : (shard + 1) * plan.shard]) for shard in shards)


def sample_shard(plan: Plan, policy: Policy, prompts: Sequence[RealPrompt], bar: tqdm) -> list[Answer]:
    """Sample one completion for each prompt, all in one batch.

    The seed of a request comes from the plan and the prompt's number.
    """
    sampling = SamplingConfig(max_new_tokens=plan.max_new_tokens)
    length = plan.max_prompt_tokens + plan.max_new_tokens
    plain = DecodingConfig(system="autoregressive", draft_tokens=0)
    engine = TorchEngine(policy, plain, slots=plan.shard, max_length=length)
    for prompt in prompts:
        engine.add(
            Request(
                id=prompt.number,
                token_ids=prompt.token_ids,
                params=sampling_params(policy, sampling, _seed(plan, prompt)),
            )
        )
    done: dict[int, Completion] = {}
    while engine.unfinished:
        ended = engine.step()
        done |= {finished.id: finished.completion for finished in ended}
        bar.update(len(ended))
    return [_answer(plan, prompt, done[prompt.number]) for prompt in prompts]


def _seed(plan: Plan, prompt: RealPrompt) -> int:
    return (plan.seed << 40) + prompt.number


def _answer(plan: Plan, prompt: RealPrompt, completion: Completion) -> Answer:
    return Answer(
        number=prompt.number, kind=prompt.kind, split=prompt.split, seed=_seed(plan, prompt),
        finish=completion.finish_reason, prompt=prompt.token_ids, answer=tuple(completion.token_ids.tolist()),
        logprobs=tuple(completion.logprobs.tolist()),
    )  # fmt: skip


def write_shard(path: Path, answers: Sequence[Answer]) -> None:
    """Write a shard of completions, atomically."""
    lines = [
        json.dumps({name: getattr(answer, name) for name in Answer.__slots__} | {"logprobs": _rounded(answer.logprobs)})
        for answer in answers
    ]
    scratch = path.with_suffix(".new")
    scratch.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    scratch.replace(path)


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]


def read_shard(path: Path) -> list[Answer]:
    """Read the file of ``write_shard``."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    lists = ("prompt", "answer", "logprobs")
    return [Answer(**(row | {name: tuple(row[name]) for name in lists})) for row in rows]


def read_corpus(folder: Path, plan: Plan, most: int | None = None) -> list[Answer]:
    """Read all completions in order, or those of the first ``most`` shards.

    Raises:
        UserError: A shard is missing.
    """
    paths = shard_paths(folder, plan)[:most]
    missing(paths, "corpus")
    return [answer for path in paths for answer in read_shard(path)]


def corpus_size(folder: Path, plan: Plan) -> dict[str, int]:
    """Return the numbers of completions and of their tokens in the existing shards."""
    answers = [answer for path in shard_paths(folder, plan) if path.is_file() for answer in read_shard(path)]
    return {"answers": len(answers), "tokens": sum(len(answer.answer) for answer in answers)}
