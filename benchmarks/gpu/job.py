"""A GRPO job in one process: the real loop, worker, engine and trainer, called directly instead of through Ray.

A machine lent for minutes has no Ray. The job is synchronous, so its completions do not depend on timing. One job uses
the built-in model, which learns. Another uses random weights in the shape of SmolLM2-135M; only its time means
something.
"""

import asyncio
import json
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from bebop.bench.gpu.models import Shape, policy_of
from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.loop import Loop
from bebop.driver.protocols import Assignment, WorkerReport
from bebop.driver.weights import CheckedWeights, SharedWeights
from bebop.metrics.metrics import Metrics
from bebop.model.checkpoint import load_tokenizer, save_policy
from bebop.monitor.certified import Certified
from bebop.rollout.worker import make_worker
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trainer import checkpoint
from bebop.trainer.rank import TrainerRank
from bebop.trajectory import Batch, Group

TIMED = ("time/", "rollout/tokens_per_s")
QUESTION = "State the final answer to the following arithmetic problem: {} ="  # as the built-in model knows it
REWARD = '''"""Whether the last number of an answer is the right one. A file of its own, which imports nothing heavy."""
import re


def score(text, item):
    numbers = re.findall(r"-?\\d+", text)
    return float(bool(numbers) and numbers[-1] == item["answer"])
'''
PLAIN, DRAFTS = {"system": "autoregressive", "draft_tokens": 0}, {"system": "bebop", "draft_tokens": 3}
# Decoding of an arm, and whether cycles are CUDA graphs launched before the previous cycle is read.
ARMS = {
    "plain": (PLAIN, False),
    "drafts": (DRAFTS, False),
    "plain, overlapped": (PLAIN, True),
    "drafts, overlapped": (DRAFTS, True),
}


class InProcess:
    """Worker and trainer behind the loop's protocols, and the sink of the loop's metrics."""

    def __init__(self, config: JobConfig, folder: Path) -> None:
        self.worker, self.trainer, self.folder = make_worker(config), TrainerRank(config), folder
        self.rows: list[tuple[int, dict[str, float]]] = []  # step, numbers that are the same in every run
        self.seconds: list[dict[str, float]] = []  # of each step, by what took them

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Give the worker prompts to decode."""
        self.worker.submit(assignments)

    async def set_weights(self, weights: CheckedWeights | SharedWeights, version: int) -> None:
        """Let the worker decode with these weights from now on."""
        self.worker.set_weights(weights, version)

    async def configure(self, decoding: Any) -> None:
        """Let the worker draft by ``decoding`` from now on."""
        self.worker.configure(decoding)

    async def collect(self, seen: int) -> WorkerReport:
        """Run one engine cycle and return its finished completions."""
        await asyncio.sleep(0)
        self.worker.turn()
        return self.worker.collect(0, seen)

    async def restart(self) -> None:
        """Do nothing: no part of one process dies by itself."""

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """Train on a batch."""
        return self.trainer.update(batch, cotrain)

    async def abandon(self) -> None:
        """Stop the update in progress if it has taken no step."""
        self.trainer.abandon()

    async def logprobs(self) -> Mapping[int, NDArray[np.float32]]:
        """Return nothing: no completion is traced."""
        return {}

    async def read_probe_set(self, *_: Any) -> Any:
        """Fail: no monitor exists that could call it."""
        raise AssertionError("no monitor")

    async def head_fingerprint(self) -> str:
        """Return the fingerprint of the head that engines should have."""
        return self.trainer.head_fingerprint()

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        """Compare completions with the trainer's distributions."""
        return self.trainer.certify(groups, since)

    async def weights(self, head: bool) -> CheckedWeights | SharedWeights:
        """Return the weights to publish."""
        return self.trainer.weights(head)

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        """Write the checkpoint of a step."""
        checkpoints = checkpoint.store(self.folder)
        staged = checkpoints.staging(step)
        self.trainer.save(staged, loop_state)
        checkpoints.publish(staged, step)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Keep the numbers of a step."""
        self.rows.append((step, {name: value for name, value in row.items() if not name.startswith(TIMED)}))
        self.seconds.append({name: value for name, value in row.items() if name.startswith(TIMED)})

    def close(self) -> None:
        """Do nothing: nothing is open."""


def questions(file: Path, count: int) -> None:
    """Write questions to a file: sums of eight to eleven digits, as in the built-in model's training."""
    numbers = random.Random(0)
    lines = []
    for _ in range(count):
        value = numbers.randrange(10)
        text = str(value)
        for _ in range(numbers.randrange(7, 11)):
            sign, term = numbers.choice((1, -1)), numbers.randrange(10)
            value += sign * term
            text += f" {'+' if sign > 0 else '-'} {term}"
        lines.append(json.dumps({"question": QUESTION.format(text), "answer": str(value)}) + "\n")
    file.write_text("".join(lines))


def written(shape: Shape, folder: Path, device: str) -> None:
    """Write a loadable model of random weights, whose tokenizer has one word per token."""
    policy = policy_of(shape, torch.device(device))
    words = {"<eos>": 0, "=": 1} | {str(number): number for number in range(2, shape.vocabulary)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="="))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    policy.tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    save_policy(policy, folder)


def carried_out(folder: Path, arm: str, steps: int, size: int, device: str, model: str = "tiny") -> dict[str, float]:
    """Run a job of an arm; return its reward at both ends, and the median seconds of a step and of its parts.

    ``model``: the built-in one, or a folder.
    """
    decoding, overlapped = ARMS[arm]
    cuda = device.startswith("cuda")
    folder.mkdir(parents=True)
    questions(folder / "task.jsonl", size * steps)
    (folder / "reward.py").write_text(REWARD)
    config = from_dict(JobConfig, {
        "model": {"path": model, "device": device, "dtype": "bfloat16" if model != "tiny" and cuda else "float32"},
        "task": {
            "source": "file", "name": "sums", "path": str(folder / "task.jsonl"), "reward": f"{folder}/reward.py:score",
        },
        "rollout": {
            "staleness": 0, "slots": 8 * size, "max_length": 256, "sampling": {"max_new_tokens": 96},
            "torch": {"overlap": overlapped, "cuda_graphs": overlapped and cuda},
        },
        "decoding": decoding,
        "trainer": {"steps": steps, "groups_per_step": size, "group_size": 8, "save_every": 0, "lr": 2e-4},
        "monitor": {"drift": False},
    })  # fmt: skip
    parts = InProcess(config, folder)
    source = PromptSource(config.task, chat_encoder(load_tokenizer(config.model)), 160)
    began = time.perf_counter()
    loop = Loop(config, source.prompt, [parts], parts, [parts])
    assert asyncio.run(loop.run())
    parts.worker.stop()
    rows = [row for _, row in parts.rows]
    third = max(1, steps // 3)
    found = {name: statistics.median(row[name] for row in parts.seconds[1:]) for name in parts.seconds[-1]}
    return {
        "s": time.perf_counter() - began,
        "reward first": statistics.fmean(row["reward/mean"] for row in rows[:third]),
        "reward last": statistics.fmean(row["reward/mean"] for row in rows[-third:]),
        "accept length": rows[-1].get("rollout/accept_length", 1.0),
        **found,
    }
