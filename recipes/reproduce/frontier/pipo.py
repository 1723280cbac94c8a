"""PIPO's pairs of tokens in the study: thresholds, questions that its network has not seen, and its witness."""

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

# The default threshold lies between .95 and 1.
SETTINGS = ({"tau": 0.5}, {"tau": 0.95}, {}, {"tau": 1.0})
INK = "nla"  # colour of its points in the figure
OFFSETS = ((6, -2), (-24, 4), (6, -9))  # offsets of the points' names, in points of print


@torch.no_grad()
def of_pairs(policy: Policy, prompts: Sequence[Prompt], answers: Sequence[Completion]) -> NDArray[np.float64]:
    """Return the witness summed over each completion [N] that was drawn in pairs, at temperature 1.

    p is that of the policy, which reads the text. Drafts and their distributions come from the network of pairs.
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
    """Return the witness of each of the T tokens of a completion in n pairs.

    The distribution that tests a place must be fixed before its token. A first token is tested with the distribution
    that it is drawn from. A second place is tested with the draft's distribution, whether or not the draft is kept: if
    it is dropped, the next pair's first token takes the place and is still tested with the draft's distribution.

    Args:
        pairs: Tokens of each pair; the second is ``pad`` where there is none.
        drafts: [n] second tokens that were drawn, ``pad`` if none was.
        pad: Id that stands for no token.
        p: [T, V] distributions of the target.
        first: [n, V] distributions from which the first token of each pair was drawn.
        second: [n, V] distributions from which its draft was drawn.
    """
    tokens, distributions = [], []
    dropped: Tensor | None = None  # distribution of a dropped draft for the next place
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
