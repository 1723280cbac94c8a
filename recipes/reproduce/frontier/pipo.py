"""Pairs of tokens in the study: thresholds, questions that the network of pairs has not seen, and its witness."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.systems.pipo.losses import batch_rows
from bebop.systems.pipo.network import PairModel
from bebop.systems.pipo.training import pair_rows
from bebop.trajectory import Completion, Prompt
from recipes.reproduce.frontier.witness import evidence
from recipes.reproduce.pipo.arms import config as config
from recipes.reproduce.pipo.arms import held_out as held_out

# Its own threshold, where none is given, lies between .95 and 1.
SETTINGS = ({"tau": 0.5}, {"tau": 0.95}, {}, {"tau": 1.0})
INK = "nla"  # of its points in the figure
OFFSETS = ((6, -2), (-24, 4), (6, -9))  # of their names, in points of print


@torch.no_grad()
def of_pairs(policy: Policy, prompts: Sequence[Prompt], answers: Sequence[Completion]) -> NDArray[np.float64]:
    """The witness summed over each answer [N] that was drawn in pairs, at temperature 1.

    p is the policy's own, which reads the text; drafts and what they were drawn from come out of the network of pairs.
    """
    network = policy.parts["pipo"]
    assert isinstance(network, PairModel)
    rows = pair_rows(prompts, answers, network.pad)
    h, u = network.read(policy, batch_rows(rows, network.pad).pairs)
    sums = []
    for row, prompt, answer, first, second in zip(rows, prompts, answers, h, u, strict=True):
        text = torch.tensor([*prompt.token_ids, *answer.token_ids.tolist()])[None]
        states = policy.hidden(text, torch.arange(text.shape[1])[None], CausalContext())
        p = policy.logits(states[0, len(prompt.token_ids) - 1 : -1]).double().softmax(-1)
        # Entry i of h and u belongs to pair i + 1.
        own = slice(row.prompt - 1, len(row.pairs) - 1)
        distributions = [network.logits(policy, part[own]).double().softmax(-1) for part in (first, second)]
        sums.append(
            float(
                pair_terms(
                    row.pairs[row.prompt :], row.drafts, network.pad, p, distributions[0], distributions[1]
                ).sum()
            )
        )
    return np.array(sums)


def pair_terms(
    pairs: Sequence[tuple[int, int]], drafts: Sequence[int], pad: int, p: Tensor, first: Tensor, second: Tensor
) -> Tensor:
    """The witness of each of the T tokens of an answer in n pairs.

    What a place is tested with has to be fixed before its token. A first token has the distribution that it is drawn
    from. A second place has the draft's, whether or not the draft is kept: if it is dropped, the token that comes to
    stand there is the next pair's first, and is tested with the draft's all the same.

    Args:
        pairs: second tokens ``pad`` where there is none.
        drafts: [n] second tokens that were drawn, ``pad`` if none was.
        pad: stands for no token.
        p: [T, V] of the target.
        first: [n, V] that the first token of a pair was drawn from.
        second: [n, V] that its draft was drawn from.
    """
    tokens, distributions = [], []
    dropped: Tensor | None = None  # what a draft for the next place was drawn from
    for place, (one, other) in enumerate(pairs):
        tokens.append(one)
        distributions.append(first[place] if dropped is None else dropped)
        dropped = None
        if other != pad:
            tokens.append(other)
            distributions.append(second[place])
        elif drafts[place] != pad:
            dropped = second[place]
    return evidence(torch.tensor(tokens), p, torch.stack(distributions))
