"""Trees of drafts that several test files decode with, and the numbers from which larger ones grow."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.config.tree_shape import Path
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.lengths import FixedLength
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import Completion
from tests.builders import requests

FIVE = [[0], [1], [0, 0], [0, 1], [1, 0]]  # the smallest tree with siblings at both depths and a second branch
CHAIN = [[0], [0, 0], [0, 0, 0]]
PARENTS = torch.tensor([[-1, -1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 0, 4, 3]])  # of two rows, a tree each
SAMPLINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 4},
]
CHANCES = ((0.4, 0.2, 0.15, 0.1), (0.35, 0.2, 0.1, 0.1), (0.3, 0.2, 0.1), (0.3, 0.2), (0.3,))


def head_tree(shape: list[list[int]], **settings: Any) -> DecodingConfig:
    """Return the settings of bebop_tree with a tree of this shape."""
    return DecodingConfig(system="bebop_tree", draft_tokens=len(shape), options={"shape": shape}, **settings)


def firp_tree(shape: list[list[int]] | tuple[Path, ...], **options: Any) -> DecodingConfig:
    """Return the settings of firp with a tree of this shape."""
    return DecodingConfig(system="firp", draft_tokens=len(shape), options={"shape": shape, **options})


def likely_firp_tree(nodes: int, **options: Any) -> DecodingConfig:
    """Return the settings of firp with the likeliest nodes by ``CHANCES``."""
    return DecodingConfig(system="firp", draft_tokens=nodes, options={"chances": CHANCES, **options})


FIRP_TREES = {
    "five": firp_tree(FIVE),
    "sixteen": likely_firp_tree(16),
    "likeliest": firp_tree(FIVE, pseudo_paths=1),
    "two-paths": likely_firp_tree(16, pseudo_paths=2),
    "greedy": dataclasses.replace(likely_firp_tree(16), draft_temperature=0.0),
}


def everything(answer: Completion) -> list[Any]:
    """Return all that is known of a completion: tokens, log-probs, work and statistics."""
    stats = answer.stats
    sums = (stats.reached, stats.accepted, stats.overlap, stats.target_only, stats.draft_entropy, stats.target_entropy)
    work = [stats.cycles, stats.tokens, stats.target_forwards, stats.draft_forwards]
    return [answer.token_ids.tolist(), answer.logprobs.tolist(), work, *(values.tolist() for values in sums)]


class ByRequest(FixedLength):
    """The first seed % 6 nodes of the tree."""

    def start(self, rows: Rows) -> Tensor:
        return rows.slots.seed[: rows.batch] % 6


def fed(policy: Policy, decoding: DecodingConfig) -> tuple[TorchEngine, Rows]:
    """Return an engine whose target has read two contexts of different lengths, with room for trees of seven nodes."""
    one = TorchEngine(policy, decoding, slots=2, max_length=64, room=7)
    asked = requests([[1, 2, 3, 4], [2, 0, 1]], max_new_tokens=20)
    one.slots.start(0, [r.params for r in asked], [[*r.token_ids] for r in asked])
    one.slots.reserve(0, [len(r.token_ids) - 1 for r in asked], cycles=1)
    with torch.inference_mode():
        one.decoder.prefill(0, [[*r.token_ids] for r in asked])
    return one, Rows(one.slots, 2, 3)
