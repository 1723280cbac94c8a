"""Trees of drafts that several test files decode with, and the numbers from which larger ones grow."""

import dataclasses
from typing import Any

import torch

from bebop.config import DecodingConfig
from bebop.trajectory import Completion
from bebop.tree_shape import Path

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
    """Return all that is known of an answer: tokens, log-probs, work and statistics."""
    stats = answer.stats
    sums = (stats.reached, stats.accepted, stats.overlap, stats.target_only, stats.draft_entropy, stats.target_entropy)
    work = [stats.cycles, stats.tokens, stats.target_forwards, stats.draft_forwards]
    return [answer.token_ids.tolist(), answer.logprobs.tolist(), work, *(values.tolist() for values in sums)]
