"""Decoding with blocks of one size, or by a system, with a record of every cycle."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.adaptation.corpus import sampling_params
from bebop.config.job import DecodingConfig, ModelConfig, SamplingConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.parts import find_part
from bebop.rollout.decoding.base import Accepted, Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.block.decoding import BlockDrafter
from bebop.systems.block.training import system_of
from bebop.trajectory import Prompt
from recipes.reproduce import study

Array = NDArray[np.float64]
Counts = NDArray[np.int64]
PARTS = ("block", "block_length")
MODEL = ModelConfig(path="tiny", device="cpu")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Costs of N completions; tables are by cycle, with 0 after a completion's last cycle."""

    tokens: Counts  # [N] tokens of the completion
    cycles: Counts  # [N]
    drafted: Counts  # [N, cycles] drafts
    emitted: Counts  # [N, cycles] accepted drafts + 1, before the end cuts the last cycle off
    ids: tuple[tuple[int, ...], ...]  # N

    @property
    def kept(self) -> Counts:
        """Return ``emitted`` [N, cycles] without the tokens that the end cuts off."""
        cut = self.emitted.copy()
        cut[np.arange(len(cut)), self.cycles - 1] -= cut.sum(1) - self.tokens
        return cut


class Watched(DraftLength):
    """A draft length that decides as another one does and records the drafted and emitted tokens of each cycle."""

    def __init__(self, length: DraftLength, count: int, tokens: int) -> None:
        self.length, self.limit = length, length.limit
        self.drafted = torch.zeros(count, tokens, dtype=torch.long)
        self.emitted = torch.zeros_like(self.drafted)

    def start(self, rows: Rows) -> Tensor | None:
        """Delegate to the inner draft length; see ``DraftLength``."""
        return self.length.start(rows)

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """Delegate to the inner draft length; see ``DraftLength``."""
        return self.length.extend(step, entropies)

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Record the cycle, then delegate; see ``DraftLength``.

        The low bits of a request's seed are the index of its prompt.
        """
        at, cycle = rows.slots.seed[: rows.batch] % 2**40, rows.slots.work[: rows.batch, 0]
        self.drafted[at, cycle] = draft.tokens.shape[1] if draft.lengths is None else draft.lengths
        self.emitted[at, cycle] = accepted.lengths + 1
        self.length.observe(rows, draft, out, accepted)


def loaded() -> Policy:
    """Load the built-in model with its block drafter and block-length network, and set torch to one thread."""
    torch.set_num_threads(1)
    return load_policy(MODEL, needs=PARTS)


def decode(
    policy: Policy,
    prompts: Sequence[Prompt],
    decoding: DecodingConfig | int,
    *,
    temperature: float = 0.0,
    draw: int = 0,
    tokens: int = 160,
    slots: int = 64,
    drafter: type[BlockDrafter] | None = None,
) -> Answers:
    """Decode with a system, or with blocks of one size.

    ``draw`` selects other random numbers. ``drafter`` replaces the drafter by a broken one.
    """
    system = system_of(decoding) if isinstance(decoding, int) else decoding
    engine = TorchEngine(policy, system, slots=slots, max_length=512, measure=False)
    assert isinstance(engine.decoder, DraftVerify)
    engine.decoder.length = watched = Watched(engine.decoder.length, len(prompts), tokens)
    if drafter is not None:
        engine.decoder.drafter.__class__ = drafter
    asked = requests(policy, prompts, temperature=temperature, draw=draw, tokens=tokens)
    answers = generate(engine, asked)
    return Answers(
        tokens=np.array([len(a.token_ids) for a in answers]),
        cycles=np.array([a.stats.cycles for a in answers]),
        drafted=watched.drafted.numpy(),
        emitted=watched.emitted.numpy(),
        ids=tuple(tuple(a.token_ids.tolist()) for a in answers),
    )


def requests(
    policy: Policy, prompts: Sequence[Prompt], *, temperature: float = 0.0, draw: int = 0, tokens: int = 160
) -> list[Request]:
    """Return one request per prompt."""
    sampling = SamplingConfig(temperature=temperature, max_new_tokens=tokens)
    return [
        Request(id=i, token_ids=p.token_ids, params=sampling_params(policy, sampling, (draw << 40) + i))
        for i, p in enumerate(prompts)
    ]


def once(name: str, settings: object, make: Callable[[], T]) -> T:
    """Return the stored result of a job, or make it (see ``study.once``); hashes of the model parts are in its key."""
    parts = [hashlib.sha256(find_part(MODEL, part).read_bytes()).hexdigest() for part in PARTS]
    return study.once("blockpilot", name, (settings, parts), make)
