"""Training losses of the block-drafting networks, and the evaluation of a choice of block sizes.

A block drafter is trained at random anchors of a completion, many blocks of a text in one pass (SPEC 5.1). Slot k of a
block at anchor t predicts token t + k. Its goal is the target's distribution for that token, which knows the tokens
t + 1..t + k - 1 that the slot does not see. Target, embedding and language-model head are constants.

A choice of block sizes is trained and evaluated on a table of each size's results (SPEC 5.2, 5.6).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, pad
from torch.nn.utils.rnn import pad_sequence

from bebop.kernels.draft_losses import needs_labels
from bebop.kernels.linear_losses import CHUNK_ROWS, linear_draft_loss, linear_e2e_tv_loss
from bebop.metrics.intervals import Interval, ratio, resampled
from bebop.model.attention import BlockContext, CausalContext
from bebop.model.backbone import Policy, shared_tables, tapped
from bebop.model.mtp import gather_rows
from bebop.systems.block.network import BlockDraftNetwork, BlockLengthNetwork
from bebop.trainer.chains import random_anchors
from bebop.trainer.objectives import WHOLE, Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadText:
    """Prompt and completion with the states of a finished pass of the target."""

    token_ids: Tensor  # [L]
    answer: int  # tokens at the end that are the completion
    hidden: Tensor  # [L, d] final, normed
    layers: Mapping[int, Tensor]  # layer -> [L, d] after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Batch of texts with anchors at which blocks begin."""

    token_ids: Tensor  # [B, L], right-padded with 0
    hidden: Tensor  # [B, L, d]
    layers: Mapping[int, Tensor]  # layer -> [B, L, d]
    anchors: Tensor  # [B, A] positions, from the last token of the prompt on
    ends: Tensor  # [B] tokens of each text

    def mask(self, block: int) -> Tensor:
        """Return a mask [B, A, b - 1] of the slots 1..b-1 that lie within the text."""
        places = self.anchors[..., None] + torch.arange(1, block, device=self.anchors.device)
        return places < self.ends[:, None, None]


@torch.no_grad()
def read_texts(policy: Policy, texts: Sequence[tuple[Sequence[int], int]], taps: Sequence[int]) -> list[ReadText]:
    """Run the target over texts, given as (token ids, tokens of the completion); similar lengths share a batch."""
    read: dict[int, ReadText] = {}
    order = sorted(range(len(texts)), key=lambda i: len(texts[i][0]))
    for start in range(0, len(order), 32):
        part = order[start : start + 32]
        ids = pad_sequence([torch.tensor(texts[i][0], device=policy.device) for i in part], batch_first=True)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        with tapped(policy.backbone.get_decoder().layers, taps) as layers:
            hidden = policy.hidden(ids, positions, CausalContext())
        for row, i in enumerate(part):
            length = len(texts[i][0])
            own = {layer: states[row, :length].clone() for layer, states in layers.items()}
            read[i] = ReadText(
                token_ids=ids[row, :length], answer=texts[i][1], hidden=hidden[row, :length].clone(), layers=own
            )
    return [read[i] for i in range(len(texts))]


def lay_out(texts: Sequence[ReadText], anchors: int, seed: int) -> Blocks:
    """Place up to ``anchors`` blocks per text at random positions; a text with fewer places has some beyond its end."""
    ends = torch.tensor([len(text.token_ids) for text in texts])
    chosen = random_anchors(ends, torch.tensor([text.answer for text in texts]), anchors, seed)
    taps = texts[0].layers
    device = texts[0].hidden.device
    return Blocks(
        token_ids=pad_sequence([text.token_ids for text in texts], batch_first=True),
        hidden=pad_sequence([text.hidden for text in texts], batch_first=True),
        layers={tap: pad_sequence([text.layers[tap] for text in texts], batch_first=True) for tap in taps},
        anchors=chosen.to(device),
        ends=ends.to(device),
    )


def slot_states(network: BlockDraftNetwork, embedding: Tensor, blocks: Blocks, block: int) -> Tensor:
    """Return states [B, A, b, d] of every slot of every block; ``embedding`` [V, d] is the target's."""
    length = blocks.token_ids.shape[1]
    anchors = blocks.anchors.clamp_max(length - 1)
    context = BlockContext(anchors, block, length)
    network.read(blocks.layers, torch.arange(length, device=anchors.device).expand_as(blocks.token_ids), context)
    newest = embedding[blocks.token_ids.gather(1, anchors)]
    positions = anchors[..., None] + torch.arange(block, device=anchors.device)
    states = network(network.slots(newest, block).flatten(1, 2), positions.flatten(1), context)
    return states.unflatten(1, (anchors.shape[1], block))


def block_loss(
    network: BlockDraftNetwork,
    embedding: Tensor,
    weight: Tensor,
    blocks: Blocks,
    *,
    kind: str,
    decay: float,
    sampling: Sampling = WHOLE,
) -> Tensor:
    """Return the mean draft loss over the slots within their text, slot k weighing exp(-(k - 1) / ``decay``).

    Args:
        network: receives the gradient.
        embedding: [V, d] of the target.
        weight: [V, d], the target's language-model head.
        blocks: see ``lay_out``.
        kind: a row of ``kernels/draft_losses.py``, as "ce" or "tv"; or "e2e_tv", 1 - expected accepted drafts over
            their number (SPEC Eq. 13), where slots have no weights.
        decay: g, in slots.
        sampling: temperature of both distributions, and truncation of the target's.
    """
    block = network.block
    mask = blocks.mask(block)
    states = slot_states(network, embedding, blocks, block)[:, :, 1:]
    last = blocks.token_ids.shape[1] - 1
    steps = torch.arange(block - 1, device=mask.device)
    places = (blocks.anchors[..., None] + steps).clamp_max(last)
    target = gather_rows(blocks.hidden, places.flatten(1)).view_as(states)
    if kind == "e2e_tv":
        drafts, wanted = states.flatten(0, 1), target.flatten(0, 1)
        return linear_e2e_tv_loss(drafts, weight, wanted, weight, mask.flatten(0, 1), **sampling.options())
    labels = blocks.token_ids.gather(1, (places + 1).clamp_max(last).flatten(1)).view_as(mask)[mask]
    losses = linear_draft_loss(
        states[mask],
        weight,
        target[mask],
        weight,
        kind=kind,
        labels=labels if needs_labels(kind) else None,
        **sampling.options(),
    ).loss
    weights = torch.exp(-steps / decay).expand_as(mask)[mask]
    return (weights * losses).sum() / weights.sum().clamp_min(1e-9)


# ---- the choice of block sizes


@torch.no_grad()
def accepted_drafts(policy: Policy, network: BlockDraftNetwork, text: ReadText, block: int) -> list[int]:
    """Return how many drafts a cycle with blocks of ``block`` slots accepts at temperature 0.

    There is one number for each place of the completion where a cycle can begin: after the prompt, after the first
    token, and so on to the last but one. A draft is accepted if it is the token of the text and all drafts before it
    are.

    Args:
        policy: the target.
        network: in the dtype of the backbone, as it is while decoding.
        text: greedy completion of the target, read after the layers that the network taps.
        block: slots, the newest token's included.
    """
    ids, last = text.token_ids, len(text.token_ids) - 1
    anchors = torch.arange(last - text.answer, last, device=ids.device)
    whole = Blocks(
        token_ids=ids[None],
        hidden=text.hidden[None],
        layers={tap: states[None] for tap, states in text.layers.items()},
        anchors=anchors[None],
        ends=torch.tensor([len(ids)], device=ids.device),
    )
    parts = []
    # Blocks do not see one another. The masks of all, and the logits of their drafts, would take gigabytes.
    for some in anchors.split(max(1, CHUNK_ROWS["cpu"] // block)):
        states = slot_states(network, shared_tables(policy)[0], replace(whole, anchors=some[None]), block)
        parts.append(policy.logits(states[0, :, 1:]).argmax(-1))
    drafts = torch.cat(parts)
    places = anchors[:, None] + torch.arange(1, block, device=ids.device)
    came = pad(ids, (0, block), value=-1)[places]  # no draft stands beyond the end
    counts: list[int] = (drafts == came).int().cumprod(1).sum(1).tolist()
    return counts


def cycles(accepted: Sequence[int]) -> int:
    """Return the number of cycles that decode a completion; ``accepted``: drafts that one accepts at each place."""
    place = count = 0
    while place < len(accepted):
        place, count = place + accepted[place] + 1, count + 1
    return count


Array = NDArray[np.float64]
CLOSE = 1e-9  # values nearer to one another than this are a tie


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Results of N prompts completed with each of C block sizes, and the input features of the choice."""

    sizes: tuple[int, ...]  # [C] rising
    tokens: Array  # [N, C] emitted, without those after the end of a completion in its last cycle
    cycles: Array  # [N, C]
    features: Tensor  # [N, F] of each prompt, see ``bebop.systems.block.network.FEATURES``

    @property
    def tau(self) -> Array:
        """Return the tokens per cycle [N, C]."""
        return self.tokens / self.cycles

    def part(self, chosen: Sequence[int] | NDArray[np.int64]) -> "Sweep":
        """Return the sweep of the prompts at the indices ``chosen``."""
        rows = np.asarray(chosen)
        return Sweep(
            sizes=self.sizes,
            tokens=self.tokens[rows],
            cycles=self.cycles[rows],
            features=self.features[torch.from_numpy(rows)],
        )


def best(values: Array) -> NDArray[np.int64]:
    """Return the index [N] of the largest value in each row [N, C]; ties go to the first, the smallest block."""
    return (values >= values.max(1, keepdims=True) - CLOSE).argmax(1)


def labels(sweep: Sweep, seconds: Array | None = None) -> NDArray[np.int64]:
    """Return the index of the best size of each prompt [N], by tau, or by tokens per time given ``seconds`` [C] per
    cycle of each size (SPEC 5.2: the paper's labels are the former, its claim is about the latter).
    """
    return best(score(sweep, seconds))


def score(sweep: Sweep, seconds: Array | None = None) -> Array:
    """Return the score of each size [N, C]: tokens per cycle, or tokens per second."""
    return sweep.tau if seconds is None else sweep.tau / seconds


def split(count: int, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the numbers 0..count-1 in three random parts, 60 / 20 / 20, for training, choosing and testing."""
    order = np.random.default_rng(seed).permutation(count)
    first, second = round(0.6 * count), round(0.8 * count)
    return order[:first], order[first:second], order[second:]


def goals(sweep: Sweep, target: str, seconds: Array | None = None) -> Tensor:
    """Return the training goals: the best size of each prompt [N], or the score of every size [N, C].

    Scores are standardised as a whole, which leaves the best of a row the best.
    """
    if target == "classify":
        return torch.from_numpy(labels(sweep, seconds))
    values = score(sweep, seconds)
    return torch.from_numpy((values - values.mean()) / max(values.std(), CLOSE)).float()


def fit(
    network: BlockLengthNetwork, features: Tensor, wanted: Tensor, *, steps: int, lr: float, batch: int, seed: int
) -> float:
    """Train on ``goals`` by cross-entropy or squared error; return the mean loss of the last tenth of the steps."""
    loss_of = mse_loss if wanted.is_floating_point() else cross_entropy
    numbers = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=1e-2)
    network.train()
    losses = []
    for _ in range(steps):
        chosen = torch.randint(len(wanted), (min(batch, len(wanted)),), generator=numbers)
        loss = loss_of(network(features[chosen]), wanted[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    network.eval()
    return float(np.mean(losses[-max(1, steps // 10) :]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Evaluation of a choice on unseen prompts, beside its baselines."""

    accuracy: float  # how often it is the best size
    tau: dict[str, Interval]  # arm -> tokens a cycle
    share: Interval  # of the oracle's gain over the best fixed size

    def summary(self) -> dict[str, object]:
        """Return the evaluation as plain data for JSON."""
        arms = {arm: [i.value, i.low, i.high] for arm, i in self.tau.items()}
        return {"accuracy": self.accuracy, "tau": arms, "share": [self.share.value, self.share.low, self.share.high]}


def evaluate(sweep: Sweep, choice: NDArray[np.int64], fixed: int, seconds: Array | None = None) -> Evaluated:
    """Compare a choice [N] (indices of sizes) with a fixed size and with the best of each prompt.

    ``fixed``: index of the best size on the training prompts. With ``seconds`` (as for ``labels``) the score is tokens
    per time, else tokens per cycle. Scores are means over prompts, intervals resample prompts.
    """
    values = score(sweep, seconds)
    rows, oracle = np.arange(len(values)), best(values)
    arms = {
        "predicted": values[rows, choice],
        "best_fixed": values[rows, np.full_like(choice, fixed)],
        "oracle": values[rows, oracle],
        **{f"fixed_{size}": values[:, i] for i, size in enumerate(sweep.sizes)},
    }
    ones = np.ones(len(rows))
    gained, possible = arms["predicted"] - arms["best_fixed"], arms["oracle"] - arms["best_fixed"]

    def share(weights: Array) -> Array:
        return (weights @ gained) / np.maximum(weights @ possible, CLOSE)

    return Evaluated(
        accuracy=float((choice == oracle).mean()),
        tau={name: ratio(own, ones) for name, own in arms.items()},
        share=resampled(share, len(rows)),
    )
