"""Measurements of one arm of one seed: acceptance of children by rank, and decoding with a tree.

The jobs run side by side.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.config.tree_shape import MAX_NODES
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.rules import TreeWalk
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats, SamplingParams
from recipes.reproduce.study import QUICK, policy, prompts

CALIBRATED_ON = 4 if QUICK else 48  # prompts, none of which is measured on
MEASURED_ON = 4 if QUICK else 64
BATCH, LONGEST = 16, 24 if QUICK else 160
BUSHY = (0.5, 0.2, 0.12, 0.08)  # ranks of the tree that children are counted on
FEWEST = 8 if QUICK else 100  # accepted parents at a depth whose children are counted there; deeper ones as at the last
Chances = tuple[tuple[float, ...], ...]


class CountsRanks(TreeWalk):
    """Tree rule that counts, at each depth, the children of accepted nodes by rank: how many were offered and accepted.

    The last cycle of a completion counts as a whole.
    """

    def __init__(self, *parts: object) -> None:
        super().__init__(*parts)
        self.offered = torch.zeros(MAX_NODES, MAX_NODES)
        self.accepted = torch.zeros(MAX_NODES, MAX_NODES)

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        accepted = super().accept(rows, draft, out, uniforms)
        assert accepted.rows is not None and draft.parents is not None
        parents = draft.parents[0].tolist()
        for path, length in zip(accepted.rows.tolist(), accepted.lengths.tolist(), strict=True):
            for depth in range(length + 1):
                children = [node for node, parent in enumerate(parents) if parent == path[depth] - 1]
                self.offered[depth, : len(children)] += 1
                if depth < length:
                    self.accepted[depth, children.index(path[depth + 1] - 1)] += 1
        return accepted

    def chances(self) -> Chances:
        """Return acceptance shares by depth and rank, down to the last depth with enough counts."""
        table = []
        for offered, accepted in zip(self.offered.tolist(), self.accepted.tolist(), strict=True):
            if offered[0] < FEWEST:
                break
            shares = [a / n for n, a in zip(offered, accepted, strict=True) if n >= FEWEST and a > 0]
            table.append(tuple(sorted(shares, reverse=True)))
        return tuple(row for row in table if row)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeArm:
    """Draft tree with the seed and temperature at which it is measured."""

    seed: int
    temperature: int
    nodes: int
    options: dict[str, Any]


def calibrate(key: tuple[int, int]) -> Chances:
    """Measure the acceptance of children by depth and rank, for a seed and a temperature."""
    seed, temperature = key
    model = policy()
    one = _engine(model, DecodingConfig(system="bebop_tree", draft_tokens=MAX_NODES, options={"ranks": BUSHY}))
    assert isinstance(one.decoder, DraftVerify)
    rule = CountsRanks()
    one.decoder.rule = rule
    generate(one, _asked(model, seed, temperature)[:CALIBRATED_ON])
    return rule.chances()


def measure(arm: TreeArm) -> DecodeStats:
    """Decode the prompts of a seed that calibration did not use."""
    model = policy()
    one = _engine(model, DecodingConfig(system="bebop_tree", draft_tokens=arm.nodes, options=arm.options))
    answers = generate(one, _asked(model, arm.seed, arm.temperature)[CALIBRATED_ON:])
    return DecodeStats.total(answer.stats for answer in answers)


def chain(nodes: int) -> dict[str, Any]:
    """Return options of a tree without siblings, which decodes bit for bit as ``bebop`` does."""
    return {"shape": [[0] * depth for depth in range(1, nodes + 1)]}


def _engine(model: Policy, config: DecodingConfig) -> TorchEngine:
    return TorchEngine(model, config, slots=BATCH, max_length=512)


def _asked(model: Policy, seed: int, temperature: int) -> list[Request]:
    stops = model.eos_token_ids
    return [
        Request(
            id=i,
            token_ids=prompt.token_ids,
            params=SamplingParams(
                temperature=float(temperature), max_new_tokens=LONGEST, stop_token_ids=stops, seed=1000 * seed + i
            ),
        )
        for i, prompt in enumerate(prompts(seed, CALIBRATED_ON + MEASURED_ON))
    ]
