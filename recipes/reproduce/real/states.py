"""Hidden states of the backbone over the corpus: computed once and memory-mapped, one file per shard.

The study stores nothing else of the target. A head reads the states, and its targets are the language-model head times
the same states. These targets are exact over the whole vocabulary and cost one product a position, where a chain of
five drafts takes ten products of its own. The likeliest 64 tokens would be smaller (384 bytes a position against 4 d).
Training would still need the states beside them, and at high entropy they omit what total variation depends on.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.lib.format import open_memmap
from torch import Tensor
from tqdm import tqdm

from bebop.adaptation.corpus import backbone_states
from bebop.bench.record import show
from bebop.errors import UserError
from bebop.model.backbone import Policy
from recipes.reproduce.cli import part_of
from recipes.reproduce.real.corpus import Answer, read_shard, shard_paths
from recipes.reproduce.real.plan import Plan, load, missing

BATCH = 8  # completions in one forward pass of the backbone
CLOSE = 0.01  # nats; largest allowed difference from the engine's log p, whose matrix products differ


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Completions with the hidden states of their tokens; the states stay on disk until they are read."""

    answers: tuple[Answer, ...]
    states: tuple[Tensor, ...]  # of each answer [P + T, d], fp32; P + T tokens

    def only(self, *splits: str) -> "Text":
        """Return the completions of the given splits."""
        chosen = [i for i, answer in enumerate(self.answers) if answer.split in splits]
        return self.at(chosen)

    def at(self, chosen: Sequence[int]) -> "Text":
        """Return the completions with the given indices."""
        return Text(answers=tuple(self.answers[i] for i in chosen), states=tuple(self.states[i] for i in chosen))


def state_path(shard: Path) -> Path:
    """Return the path of the states of a corpus shard."""
    return shard.parent.parent / "states" / shard.with_suffix(".npy").name


def make_states(folder: Path, plan: Plan, policy: Policy | None = None, share: tuple[int, int] = (1, 1)) -> None:
    """Compute the states of every corpus shard that has none yet, and check them against the engine's log-probs.

    ``share``: (i, n) takes every n-th shard from the i-th, as in ``make_corpus``.

    Raises:
        UserError: A shard of the corpus is missing, or was not sampled by this model.
    """
    shards = part_of(shard_paths(folder, plan), share)
    missing(shards, "corpus")
    make_states_of([shard for shard in shards if not state_path(shard).is_file()], plan, policy)


def make_states_of(shards: Sequence[Path], plan: Plan, policy: Policy | None = None) -> None:
    """Compute, check and write the states of the given shards, one after the other."""
    if not shards:
        return
    policy = load(plan) if policy is None else policy
    tokens, began = 0, time.process_time()
    for shard in tqdm(shards, desc="states", unit="shard"):
        answers = read_shard(shard)
        states = backbone_states(policy, [answer.row for answer in answers], BATCH)
        check_states(policy, answers, states, shard)
        write_states(state_path(shard), states)
        tokens += sum(len(one) for one in states)
    seconds = time.process_time() - began
    show(f"states: {tokens:,} tokens in {seconds:,.0f} s of processor time, {tokens / seconds:.0f} a second\n")


@torch.no_grad()
def check_states(policy: Policy, answers: Sequence[Answer], states: Sequence[Tensor], shard: Path) -> None:
    """Check the longest completion of a shard: its log-probs under these states must match those of the engine.

    Raises:
        UserError: They differ by more than ``CLOSE`` nats.
    """
    place = max(range(len(answers)), key=lambda i: len(answers[i].answer))
    answer, hidden = answers[place], states[place]
    first = len(answer.prompt) - 1
    logits = policy.logits(hidden[first : first + len(answer.answer)])
    logp = logits.log_softmax(-1).gather(1, torch.tensor(answer.answer)[:, None])[:, 0]
    worst = float((logp - torch.tensor(answer.logprobs)).abs().max())
    if worst > CLOSE:
        raise UserError(
            f"{shard}: log p of answer {answer.number} differs by {worst:.3f} nats from what the engine gave: it is "
            "not this model's; remove the corpus and make it again"
        )


def write_states(path: Path, states: Sequence[Tensor]) -> None:
    """Write the states of all rows end to end [tokens, d], atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    shape = (sum(len(one) for one in states), states[0].shape[1])
    out = open_memmap(scratch, mode="w+", dtype=np.float32, shape=shape)
    out[:] = torch.cat(list(states)).float().numpy()
    out.flush()
    scratch.replace(path)


def read_states(path: Path, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Read the file of ``write_states`` and split it into texts of the given lengths.

    Raises:
        UserError: The file and the texts have different numbers of tokens.
    """
    # Copy on write: torch rejects read-only arrays, and nothing here writes.
    whole = torch.from_numpy(np.load(path, mmap_mode="c"))
    if len(whole) != sum(lengths):
        raise UserError(
            f"{path} holds {len(whole)} states, its answers {sum(lengths)} tokens: remove it, and run again the stage "
            "that makes it"
        )
    return whole.split(lengths)


def read_text(folder: Path, plan: Plan, most: int | None = None) -> Text:
    """Read the completions and states of all shards, or of the first ``most``.

    Raises:
        UserError: A shard of the corpus or its states are missing, or do not belong together.
    """
    shards = shard_paths(folder, plan)[:most]
    missing(shards, "corpus")
    missing([state_path(shard) for shard in shards], "states")
    answers: list[Answer] = []
    states: list[Tensor] = []
    for shard in shards:
        some = read_shard(shard)
        lengths = [len(answer.prompt) + len(answer.answer) for answer in some]
        answers += some
        states += read_states(state_path(shard), lengths)
    return Text(answers=tuple(answers), states=tuple(states))
