"""Ways to predict several tokens at once, trained on the same completions, anchors and number of updates."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from bebop.config.job import TrainerConfig
from bebop.systems.firp.losses import Anchored, ReadRow, firp_loss, lay_out
from bebop.systems.firp.network import PseudoStates
from bebop.trainer.chains import rows_of_step
from bebop.trainer.optim import GuardedAdamW, learning_rate
from recipes.reproduce.firp.heads import EarlyExits, Heads, MedusaHeads, head_loss
from recipes.reproduce.firp.texts import ANSWERS, Seed, once, token_ids
from recipes.reproduce.study import QUICK

STEPS = 3  # K
LAYERS = (5, 6, 7)  # t_k of the main arms: the default of the training
UPDATES = 4 if QUICK else 200  # updates of each step
SHORT = 2 if QUICK else 80  # updates of each arm in the sweeps over layers
ROWS, ANCHORS = 16, 16  # completions in an update, anchors in a completion
WARM = 0.3  # share of the updates on KL before another objective, as in the product
RATES = {"firp": 1e-2, "medusa": 2e-2, "exit": 4e-2}
FIRST = (1, 3, 5, 7, 9, 11, 12)  # layers of step 1 in its sweep
SECOND = (5, 6, 8, 10, 12)  # layers of step 2 in its sweep, step 1 at LAYERS[0] and trained in full


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A way to predict and its training: Arm(kind="firp", objective="tv")."""

    kind: str  # firp, identity, random; medusa, exit
    objective: str = "kl"
    layers: tuple[int, ...] = LAYERS
    masked: bool = False
    updates: tuple[int, ...] = (UPDATES,) * STEPS  # of each step


ARMS = {
    "FIRP": Arm(kind="firp"),
    "FIRP, TV": Arm(kind="firp", objective="tv"),
    "FIRP, e2e TV": Arm(kind="firp", objective="e2e_tv"),
    "FIRP, masked": Arm(kind="firp", masked=True),
    "Medusa": Arm(kind="medusa", objective="hard_ce"),
    "Medusa, KL": Arm(kind="medusa"),
    "early exits": Arm(kind="exit"),
    "identity": Arm(kind="identity"),
    "random": Arm(kind="random"),
}
FIRST_SWEEP = {f"step 1 at {t}": Arm(kind="firp", layers=(t,), updates=(SHORT,)) for t in FIRST}
SECOND_SWEEP = {f"step 2 at {t}": Arm(kind="firp", layers=(LAYERS[0], t), updates=(UPDATES, SHORT)) for t in SECOND}


def trained(own: Seed, arm: Arm) -> PseudoStates | Heads:
    """Return the network of an arm, which is trained unless it is stored."""
    return KINDS[arm.kind](own, arm)


def untrained(own: Seed, arm: Arm) -> PseudoStates:
    """Return pseudo states whose matrices are the identity."""
    size = own.policy.backbone.config.hidden_size
    return PseudoStates(hidden_size=size, layers=arm.layers, masked=arm.masked).requires_grad_(False)


def random(own: Seed, arm: Arm) -> PseudoStates:
    """Return pseudo states whose matrices are random normal numbers."""
    network, numbers = untrained(own, arm), torch.Generator().manual_seed(own.number)
    for one in network.parameters():
        one.copy_(torch.randn(one.shape, generator=numbers) / one.shape[1] ** 0.5)
    return network


def pseudo(own: Seed, arm: Arm) -> PseudoStates:
    """Return pseudo states with trained matrices."""
    network = untrained(own, arm)
    for step in range(1, len(arm.layers) + 1):
        network.maps[step - 1].weight.copy_(matrix(own, arm, step))
    return network


def medusa(own: Seed, arm: Arm) -> Heads:
    """Return trained Medusa heads."""
    return fitted(own, arm, MedusaHeads(own.policy, STEPS))


def exits(own: Seed, arm: Arm) -> Heads:
    """Return trained early exits."""
    return fitted(own, arm, EarlyExits(own.policy, arm.layers))


def fitted(own: Seed, arm: Arm, heads: Heads) -> Heads:
    """Load the trained weights of all steps into the heads, and freeze them."""
    for step in range(1, STEPS + 1):
        key = (own.number, ANSWERS, arm, step, RATES, ROWS, ANCHORS)
        kept = once("head", key, lambda step=step: fit_head(own, heads, arm, step))  # type: ignore[misc]
        heads.load_state_dict(kept, strict=False)
    return heads.requires_grad_(False)


KINDS: Mapping[str, Callable[[Seed, Arm], PseudoStates | Heads]] = {
    "firp": pseudo, "identity": untrained, "random": random, "medusa": medusa, "exit": exits,
}  # fmt: skip


def matrix(own: Seed, arm: Arm, step: int) -> Tensor:
    """Return the matrix W_k of an arm.

    Arms share matrices as long as they do not differ: e2e TV of one step is TV, and the first step sees no earlier one.
    """
    same = replace(
        arm,
        layers=arm.layers[:step],
        updates=arm.updates[:step],
        objective="tv" if (arm.objective, step) == ("e2e_tv", 1) else arm.objective,
        masked=arm.masked and step > 1,
    )
    key = (own.number, ANSWERS, same, RATES, ROWS, ANCHORS, WARM)
    return once("matrix", key, lambda: fit_matrix(own, same))


def fit_matrix(own: Seed, arm: Arm) -> Tensor:
    """Train the matrix of the arm's last step; the earlier ones are frozen (SPEC 3.2)."""
    model, step = own.policy, len(arm.layers)
    network = untrained(own, arm)
    for earlier in range(1, step):
        network.maps[earlier - 1].weight.copy_(matrix(own, arm, earlier))
    last = network.maps[step - 1].requires_grad_(True)

    def loss(texts: Anchored, _: Tensor, place: int) -> Tensor:
        kind = "kl" if place < WARM * arm.updates[-1] else arm.objective
        return firp_loss(model, network, texts, step, kind=kind)

    fit(own, dict(last.named_parameters()), loss, step, arm.updates[-1], RATES["firp"], arm.layers)
    return last.weight.detach().clone()


def fit_head(own: Seed, heads: Heads, arm: Arm, step: int) -> dict[str, Tensor]:
    """Train the head of a step."""

    def loss(texts: Anchored, ids: Tensor, _: int) -> Tensor:
        return head_loss(own.policy, heads, texts, ids, step, arm.objective)

    named = heads.own(step - 1)
    fit(own, named, loss, step, arm.updates[step - 1], RATES[arm.kind], heads.layers)
    return {name: p.detach().clone() for name, p in named.items()}


def fit(
    own: Seed,
    named: Mapping[str, nn.Parameter],
    loss: Callable[[Anchored, Tensor, int], Tensor],
    step: int,
    updates: int,
    rate: float,
    layers: Collection[int],
) -> None:
    """Train a step as ``bebop.adapt part=firp`` does, on states read after ``layers``.

    All arms see the same completions and anchors in the same order.
    """
    rates = TrainerConfig(lr=rate, steps=updates, lr_schedule="cosine", lr_warmup_steps=20)
    optimizer = GuardedAdamW(dict(named), rates, setting="lr", loss="the loss", causes="weights")
    rows, read = own.texts.training, [text.only(layers) for text in own.training]
    for place in range(updates):
        version = (step - 1) * updates + place
        chosen = rows_of_step(len(rows), ROWS, own.number, version)
        texts = lay_out(
            [ReadRow(real=read[i], answer=len(rows[i].answer)) for i in chosen], ANCHORS, seed(own, version)
        )
        optimizer.zero_grad()
        loss(texts, token_ids([rows[i] for i in chosen]), place).backward()  # type: ignore[no-untyped-call]
        optimizer.guarded_step(learning_rate(rates, place))


def seed(own: Seed, version: int) -> int:
    """Return the seed of the anchors of an update."""
    return (own.number << 32) + version
