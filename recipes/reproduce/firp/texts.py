"""Texts of a seed: completions to train on, greedy and sampled completions of held-out prompts; and stored jobs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.adaptation.corpus import drafting_config, question_streams, run_engine, token_rows
from bebop.config.job import SamplingConfig
from bebop.model.backbone import Policy
from bebop.systems.firp.network import RealText, read_text
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Prompt
from recipes.reproduce import study
from recipes.reproduce.study import QUICK, policy, settings

ANSWERS = 16 if QUICK else 400  # completions to train on
CALIBRATION = 6 if QUICK else 48  # training prompts whose greedy completions shape the trees
HELD_OUT = 6 if QUICK else 64  # prompts that the training does not contain
READ = tuple(range(1, 13))  # states after these layers are kept: all 12
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """All completions of a seed."""

    training: Sequence[TokenRow]  # sampled at temperature 1
    calibration: Sequence[TokenRow]  # greedy
    greedy: Sequence[TokenRow]  # held-out prompts
    sampled: Sequence[TokenRow]  # the same prompts


class Seed:
    """The model and the texts of a seed; states are computed on first use."""

    batch = 16  # texts that are measured together

    def __init__(self, seed: int) -> None:
        self.number = seed
        self.texts: Texts = once("texts", (seed, ANSWERS, CALIBRATION, HELD_OUT), lambda: answers(seed))

    @cached_property
    def policy(self) -> Policy:
        """Load the built-in model, frozen."""
        model = policy()
        model.backbone.requires_grad_(False)
        return model

    @cached_property
    def training(self) -> list[RealText]:
        """Return the hidden states of the training completions, as pseudo states read them."""
        return self.read(self.texts.training)

    @cached_property
    def judged(self) -> dict[str, list[RealText]]:
        """Return the hidden states of all other completions, by name."""
        return {name: self.read(getattr(self.texts, name)) for name in ("calibration", "greedy", "sampled")}

    def read(self, rows: Sequence[TokenRow]) -> list[RealText]:
        """Return the real states of some completions."""
        return read_text(self.policy, READ, [row.token_ids for row in rows])


def prepare(seed: int) -> None:
    """Store the completions of a seed, so that no two processes make them at the same time."""
    Seed(seed)


def answers(seed: int) -> Texts:
    """Sample the texts of a seed; no held-out prompt is among the training prompts (``question_streams``)."""
    config, model = settings(seed, f"evaluation.prompts={HELD_OUT}"), policy()
    training, held_out = question_streams(config, model)
    greedy = SamplingConfig(temperature=0.0, max_new_tokens=config.data.sampling.max_new_tokens)

    def written(prompts: Sequence[Prompt], number: int, sampling: SamplingConfig | None = None) -> list[TokenRow]:
        return token_rows(
            prompts, run_engine(model, prompts, config.data, drafting_config(model), number, sampling=sampling)
        )

    return Texts(
        training=written(training[:ANSWERS], seed),
        calibration=written(training[:CALIBRATION], seed, greedy),
        greedy=written(held_out, seed, greedy),
        sampled=written(held_out, seed + 1),
    )


def token_ids(rows: Sequence[TokenRow]) -> Tensor:
    """Return the token ids of texts [B, L], right-padded with 0."""
    return pad_sequence([torch.tensor(row.token_ids) for row in rows], batch_first=True)


def once(name: str, settings: object, make: Callable[[], T]) -> T:
    """Return the stored result of a job of this study, or make it; see ``study.once``."""
    return study.once("firp", name, (settings, QUICK), make)
