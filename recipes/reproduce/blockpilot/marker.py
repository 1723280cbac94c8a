"""A planted signal in real decoding: a marker token in the prompt decides which block sizes work.

Half of the prompts end with a marker. On those the drafter fails with blocks of more than ``NARROW`` slots: each draft
is then the token that it finds least likely. Everything else is unchanged: the shipped drafter, the model and the
tasks.
"""

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.rollout.decoding.base import Rows
from bebop.systems.block.decoding import BlockDrafter
from bebop.systems.block.losses import Sweep, best
from bebop.systems.block.network import FEATURES
from bebop.systems.block.training import prompt_ends
from bebop.trajectory import Prompt
from recipes.reproduce.blockpilot.decoding import Array, Counts, decode, loaded, once
from recipes.reproduce.blockpilot.protocol import fifths, trained
from recipes.reproduce.blockpilot.sweeps import held_out
from recipes.reproduce.study import QUICK

MARKER = 340  # a token
NARROW = 4  # slots
SIZES = (4, 8)
PROMPTS = 10 if QUICK else 75
TOKENS = 16 if QUICK else 32


class Failing(BlockDrafter):
    """A drafter that fails on wide blocks of prompts that end with the marker."""

    def _pass(self, rows: Rows, block: int, wanted: Tensor | None) -> Tensor:
        states = super()._pass(rows, block, wanted)
        slots = torch.full_like(rows.fed, block) if wanted is None else wanted + 1
        ends = rows.fed - rows.slots.count[: rows.batch]  # where the prompt ends
        bad = (rows.slots.prompts[: rows.batch].gather(1, ends[:, None])[:, 0] == MARKER) & (slots > NARROW)
        return torch.where(bad[:, None, None], -states, states)


@dataclass(frozen=True, slots=True, kw_only=True)
class Planted:
    """Measurements of N prompts with a planted marker: tokens per cycle at temperature 0."""

    tau: Array  # [N, C] with each size
    fixed: Array  # [N] with the size that was best for the training prompts
    decoded: dict[str, Array]  # predictor, permuted -> [N] as decoded, the first cycle with the default size
    sizes: dict[str, Counts]  # the same -> [N] size of the second cycle
    marked: Counts  # [N] 1 with the marker, else 0


def planted(seed: int) -> Planted:
    """Return the measurements of a seed."""
    return once("planted", (seed, PROMPTS, TOKENS, SIZES, MARKER, NARROW), lambda: _planted(seed))


def _planted(seed: int) -> Planted:
    model = loaded()
    which = np.random.default_rng(seed).integers(0, 2, PROMPTS)
    prompts = [with_marker(p) if marked else p for p, marked in zip(held_out(seed, PROMPTS), which, strict=True)]
    swept = [decode(model, prompts, size, tokens=TOKENS, drafter=Failing) for size in SIZES]
    table = Sweep(
        sizes=SIZES,
        tokens=np.stack([a.tokens for a in swept], 1).astype(float),
        cycles=np.stack([a.cycles for a in swept], 1).astype(float),
        features=FEATURES["logits"](prompt_ends(model, prompts)),
    )
    order = torch.randperm(PROMPTS, generator=torch.Generator().manual_seed(seed))
    given = {"predictor": table, "permuted": dataclasses.replace(table, features=table.features[order])}
    decoded = {name: np.zeros(PROMPTS) for name in given}
    sizes, fixed = {name: np.zeros(PROMPTS, int) for name in given}, np.zeros(PROMPTS)
    system = DecodingConfig(system="blockpilot", draft_tokens=max(SIZES) - 1)
    for number, (train, _, test) in enumerate(fifths([p.task for p in prompts], seed)):
        fixed[test] = table.tau[test, int(table.tau[train].mean(0).argmax())]
        for name, own in given.items():
            model.parts["block_length"] = trained(own, train, "classify", None, 10 * seed + number)
            answers = decode(model, [prompts[i] for i in test], system, tokens=TOKENS, drafter=Failing)
            decoded[name][test] = answers.tokens / answers.cycles
            sizes[name][test] = answers.drafted[:, 1] + 1
    return Planted(tau=table.tau, fixed=fixed, decoded=decoded, sizes=sizes, marked=which)


def with_marker(prompt: Prompt) -> Prompt:
    """Return a copy of the prompt with the marker at its end."""
    return dataclasses.replace(prompt, token_ids=(*prompt.token_ids, MARKER))


def accuracy(found: Planted) -> float:
    """Return the share of requests that were decoded with their best size."""
    return float((found.sizes["predictor"] == np.array(SIZES)[best(found.tau)]).mean())
