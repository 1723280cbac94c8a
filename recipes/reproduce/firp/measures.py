"""Measurements of an arm on held-out prompts: ranks in greedy text, overlap in sampled text, cosines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cosine_similarity

from bebop.config.tree_shape import likeliest, rank_chances
from bebop.metrics.intervals import Array
from bebop.model.mtp import gather_rows
from bebop.systems.firp.losses import BEYOND, Drafts, cycles, drafts_of, token_ranks
from bebop.systems.firp.network import PseudoStates, RealText, pseudo_beside
from bebop.trainer.chains import TokenRow
from recipes.reproduce.firp.arms import Arm, trained
from recipes.reproduce.firp.heads import Heads
from recipes.reproduce.firp.texts import Seed, once

NODES = (16, 32, 63)
CHAIN = 3  # a chain of the K likeliest drafts, as ``firp_chain`` verifies
TOP = (1, 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Measurements of an arm of K steps on R held-out prompts of a seed."""

    tasks: tuple[str, ...]  # R
    tokens: Array  # [R] of the greedy answers
    cycles: dict[int, Array]  # nodes of the tree -> [R]
    hits: Array  # [R, K, 2] places of greedy completions whose token was among the 1 or 5 likeliest
    places: Array  # [R, K] places of greedy completions with a token at that step
    overlap: Array  # [R, K] sums over places of sampled answers
    divergence: Array  # [R, K] sums of KL
    accepted: Array  # [R] sums of the drafts of a chain that would be accepted at temperature 1
    anchors: Array  # [R] places summed in overlap, divergence and accepted
    parameters: int

    def length(self, nodes: int) -> float:
        """Return tokens per cycle at temperature 0."""
        return float(self.tokens.sum() / self.cycles[nodes].sum())

    def accuracy(self, step: int, top: int = 1) -> float:
        """Return the top-``top`` accuracy of ``step`` (from 1) on greedy completions."""
        return float(self.hits[:, step - 1, TOP.index(top)].sum() / self.places[:, step - 1].sum())

    @property
    def chain(self) -> float:
        """Return tokens per cycle at temperature 1, if a cycle began at every anchor."""
        return float(1 + self.accepted.sum() / self.anchors.sum())


def measured(own: Seed, arm: Arm) -> Measured:
    """Return the measurements of an arm of a seed, from disk if they are stored."""
    return once("measured", (own.number, arm, NODES), lambda: measure(own, trained(own, arm)))


@torch.no_grad()
def measure(own: Seed, network: PseudoStates | Heads) -> Measured:
    """Measure a network; each arm has its own trees, shaped by ranks on prompts of the training."""
    drafts = network.drafts() if isinstance(network, Heads) else drafts_of(own.policy, network)
    texts, read = own.texts, own.judged
    calibration = token_ranks(drafts, texts.calibration, read["calibration"], own.batch)
    chances = rank_chances([r for r in place if r != BEYOND] for answer in calibration for place in answer)
    greedy = token_ranks(drafts, texts.greedy, read["greedy"], own.batch)
    steps = len(greedy[0][0])
    shapes = {nodes: {*likeliest(chances, nodes, steps)} for nodes in NODES}
    shapes[CHAIN] = {(0,) * depth for depth in range(1, steps + 1)}
    sums = [sampled(own, drafts, texts.sampled[i : i + own.batch], read["sampled"][i : i + own.batch])
            for i in range(0, len(texts.sampled), own.batch)]  # fmt: skip
    overlap, divergence, accepted, anchors = (np.concatenate(part) for part in zip(*sums, strict=True))
    return Measured(
        tasks=tuple(row.task for row in texts.greedy),
        tokens=np.array([len(answer) for answer in greedy], float),
        cycles={n: np.array([cycles(answer, shape) for answer in greedy], float) for n, shape in shapes.items()},
        hits=np.array([hits(answer) for answer in greedy]),
        places=np.array([[sum(place[k] != BEYOND for place in answer) for k in range(steps)] for answer in greedy]),
        overlap=overlap, divergence=divergence, accepted=accepted, anchors=anchors,
        parameters=sum(p.numel() for p in network.parameters()),
    )  # fmt: skip


def hits(answer: Sequence[Sequence[int]]) -> NDArray[np.float64]:
    """Return the number of places [K, 2] with a rank below 1 and below 5."""
    ranks = np.array(answer)
    return np.stack([((ranks >= 0) & (ranks < top)).sum(0) for top in TOP], -1).astype(float)


def sampled(own: Seed, drafts: Drafts, rows: Sequence[TokenRow], read: Sequence[RealText]) -> tuple[Array, ...]:
    """Return sums over the anchors of some completions from which all K steps lie in the text.

    They are overlap [R, K], KL [R, K], accepted drafts of a chain [R], and the number of anchors [R]. Step j of a chain
    counts alpha_j times the product over i < j of min(1, q_i(y_i) / p_i(y_i)). The tokens y of the text were drawn from
    p, so the mean is what rejection sampling accepts (SPEC 0.6).
    """
    real = RealText.beside(read)
    length = real.hidden.shape[1]
    answers = torch.tensor([len(row.answer) for row in rows])
    ends = torch.tensor([len(row.token_ids) for row in rows])
    anchors = (ends - answers - 1)[:, None] + torch.arange(int(answers.max()))
    logits = drafts(real, anchors.clamp_max(length - 1))
    steps = logits.shape[2]
    ahead = (anchors[..., None] + torch.arange(1, steps + 1)).clamp_max(length - 1)
    target = own.policy.logits(gather_rows(real.hidden, ahead.flatten(1))).view_as(logits)
    ids = torch.zeros(len(rows), length + 1, dtype=torch.long)
    for i, row in enumerate(rows):
        ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids)
    came = ids.gather(1, (ahead + 1).flatten(1)).view_as(ahead)[..., None]
    log_p, log_q = target.log_softmax(-1), logits.log_softmax(-1)
    overlap = torch.minimum(log_p, log_q).exp().sum(-1)
    divergence = (log_p.exp() * (log_p - log_q)).sum(-1)
    stands = (log_q - log_p).gather(-1, came)[..., 0].clamp_max(0).exp()
    before = torch.cat([torch.ones_like(stands[..., :1]), stands.cumprod(-1)[..., :-1]], -1)
    counted = (anchors + steps + 1 < ends[:, None]).to(overlap.dtype)
    parts = (overlap, divergence, (before * overlap).sum(-1, keepdim=True), torch.ones_like(overlap[..., :1]))
    sums = [(part * counted[..., None]).sum(1).double().numpy() for part in parts]
    return sums[0], sums[1], sums[2][:, 0], sums[3][:, 0]


def cosines(own: Seed, arm: Arm) -> dict[str, Array]:
    """Return mean cosines of pseudo states after each layer by name, each [K, layers + 1], NaN before a step enters.

    ``own``: with the real state of the token that the pseudo state stands for. ``other``: with that of another place of
    the text. ``centred``: as ``own``, after the mean of all real states is subtracted from both.
    """
    return once("cosines", (own.number, arm), lambda: _cosines(own, arm))


@torch.no_grad()
def _cosines(own: Seed, arm: Arm) -> dict[str, Array]:
    network = trained(own, arm)
    assert isinstance(network, PseudoStates)
    rows, read = own.texts.sampled, own.judged["sampled"]
    depth = len(own.policy.backbone.get_decoder().layers)
    means = {t: torch.cat([one.entering[t][0] for one in read]).mean(0) for t in read[0].entering}
    sums, counts = {n: np.zeros((len(arm.layers), depth + 1)) for n in ("own", "other", "centred")}, 0
    for row, text in zip(rows, read, strict=True):
        first, last = len(row.prompt) - 1, len(row.token_ids) - len(arm.layers) - 2
        if last < first:
            continue
        anchors = torch.arange(first, last + 1)[None]
        counts += anchors.numel()
        _, passed = pseudo_beside(own.policy, network, text, anchors, len(arm.layers), taps=True)
        elsewhere = anchors.flip(1)
        for k, (enters, states) in enumerate(zip(arm.layers, passed, strict=True)):
            for layer, state in enumerate(states, enters):
                real = text.entering[layer]
                there, other = gather_rows(real, anchors + k + 1), gather_rows(real, elsewhere + k + 1)
                mean = means[layer]
                sums["own"][k, layer] += total(state, there)
                sums["other"][k, layer] += total(state, other)
                sums["centred"][k, layer] += total(state - mean, there - mean)
    for table in sums.values():
        table[:] = np.where(table == 0, np.nan, table / max(1, counts))
    return sums


def total(a: Tensor, b: Tensor) -> float:
    """Return the sum of cosines."""
    return float(cosine_similarity(a, b, dim=-1).sum())
