"""Results of an adaptation with known numbers, without running one; and a small model to run one on."""

import dataclasses
from typing import Any

import numpy as np

from bebop.adaptation.evaluation import Measured
from bebop.adaptation.probe import NUMBERS, Probe
from bebop.adaptation.results import Results, Snapshot
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import from_dict
from bebop.config.job import ModelConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_tokenizer
from tests.builders import bare_policy

TASKS = ("chain_sum", "gcd")


def config(**sections: Any) -> AdaptConfig:
    """The default configuration with sections overridden."""
    return from_dict(AdaptConfig, {"model": {"path": "tiny", "device": "cpu"}, **sections})


def random_policy(layout: str = "mimo", layers: int = 2) -> Policy:
    """A policy of random weights with the built-in model's tokenizer.

    It has width 32 where the built-in model has 12 layers of 128: training and decoding cost a fraction.
    """
    tokenizer = load_tokenizer(ModelConfig(path="tiny"))
    return dataclasses.replace(bare_policy(len(tokenizer), layers=layers), tokenizer=tokenizer, layout=layout)


def measured(rate: float, prompts: int = 40, drafts: int = 3, seed: int = 0) -> Measured:
    """Ten cycles a prompt, each draft accepted with ``rate``."""
    rng = np.random.default_rng(seed)
    reached = np.zeros((prompts, drafts))
    accepted = np.zeros((prompts, drafts))
    reached[:, 0] = 10
    for k in range(drafts):
        accepted[:, k] = rng.binomial(reached[:, k].astype(int), rate)
        if k + 1 < drafts:
            reached[:, k + 1] = accepted[:, k]
    sampling = {name: value * reached for name, value in (("overlap", rate), ("target_only", rate - 0.1))}
    return Measured(
        tasks=tuple(TASKS[i % 2] for i in range(prompts)), cycles=np.full(prompts, 10.0),
        tokens=10 + accepted.sum(1), reached=reached, accepted=accepted,
        draft_entropy=0.5 * reached, target_entropy=0.3 * reached, **sampling,
    )  # fmt: skip


def probed(rate: float, texts: int = 20, places: int = 30, drafts: int = 3, seed: int = 0) -> Probe:
    """Overlaps around ``rate``; three tokens in four favour a sampled draft, by more than the margin."""
    rng = np.random.default_rng(seed)
    count = texts * places
    numbers = {name: rng.random((count, drafts)) for name in NUMBERS}
    numbers["overlap"] = np.clip(rate + 0.1 * rng.standard_normal((count, drafts)), 0.1, 0.9)
    ahead = np.where(np.arange(count) % 4 == 0, 0.08, -0.08)[:, None]
    numbers["target_only"] = numbers["overlap"] + ahead
    numbers["target_entropy"] = 0.02 + rng.exponential(0.3, (count, drafts))
    numbers["overlap"][places - 1 :: places, 1:] = np.nan  # the last token of a text has one step
    row = np.repeat(np.arange(texts), places)
    return Probe(
        row=row, place=np.tile(np.arange(places), texts), task=np.array(TASKS)[row % 2], numbers=numbers,
        accept=1 + 3 * rng.random(count), accept_greedy=1 + 2 * rng.random(count),
    )  # fmt: skip


def results(before: float = 0.6, after: float = 0.75, fresh: bool = False) -> Results:
    """Before and after, with greedy drafts a little behind sampled ones."""

    def snapshot(rate: float) -> Snapshot:
        decoded = {"bebop": measured(rate), "target_only": measured(rate - 0.1, seed=1)}
        return Snapshot(decoded=decoded, probe=probed(rate))

    return Results(
        before=snapshot(before), after=snapshot(after), rows=2000, tokens=163_840, steps=400, fresh=fresh,
        repeated=0, seconds={"train": 90.0, "before": 30.0},
    )  # fmt: skip
