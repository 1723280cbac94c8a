"""Pseudo hidden states: what real states and pseudo states depend on, and what they can reach at best (SPEC 3.5)."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from bebop.errors import UserError
from bebop.model.attention import ATTENTION, AttentionContext, CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import gather_rows
from bebop.systems import firp
from bebop.systems.firp.network import PseudoContext, PseudoStates, hidden_with_pseudo
from tests.builders import bare_policy, letters
from tests.cases import slow_but

LENGTH, SIZE, STEPS, LAYERS = 10, 32, 3, (2, 3, 3)
ANCHORS = torch.tensor([[0, 2, 3, 5], [5, 4, 1, 0]])  # with true tokens three places later


@pytest.fixture(scope="module")
def policy() -> Policy:
    one = bare_policy(8, seed=4, layers=5, dtype=torch.float64)
    one.backbone.requires_grad_(False)
    return one


def network(
    masked: bool = False, layers: Sequence[int] = LAYERS, kind: type[PseudoStates] = PseudoStates
) -> PseudoStates:
    """Matrices that are not the identity."""
    made = kind(hidden_size=SIZE, layers=layers, masked=masked).double()
    numbers = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for one in made.maps:
            one.weight.add_(0.3 * torch.randn(SIZE, SIZE, generator=numbers, dtype=torch.float64))  # type: ignore[operator]
    return made


def texts(seed: int = 0) -> Tensor:
    return torch.randint(0, 8, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def passed(
    policy: Policy,
    own: PseudoStates,
    ids: Tensor | None = None,
    context: type[PseudoContext] = PseudoContext,
    offset: int = 0,
) -> tuple[Tensor, Tensor]:
    """Real states [2, L, d] and pseudo states [2, A, K, d]; ``offset``: added to every position id."""
    ids = texts() if ids is None else ids
    positions = torch.arange(LENGTH).expand(2, -1) + offset
    return hidden_with_pseudo(policy, own, ids, positions, ANCHORS, context.training(ANCHORS, LENGTH, own.masked))


def frozen(policy: Policy, ids: Tensor, offset: int = 0) -> Tensor:
    return policy.hidden(ids, torch.arange(LENGTH).expand(2, -1) + offset, CausalContext())


class Leaks(PseudoContext):
    """The last real state takes in what a pseudo state has seen."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        out = super().attend(layer, query, key, value, scaling)
        last = self.width - 1
        return torch.cat([out[:, :last], out[:, last : last + 1] + out[:, -1:], out[:, last + 1 :]], 1)


# ---- F1: real states


def test_real_logits_are_those_of_the_model_alone(policy: Policy) -> None:
    alone = policy.logits(frozen(policy, texts()))
    for masked in (False, True):
        real, _ = passed(policy, network(masked))
        assert (policy.logits(real) - alone).abs().max() < 1e-10
    real, _ = passed(policy, network(), context=Leaks)
    assert (policy.logits(real) - alone).abs().max() > 1e-3


# ---- F2: the mask


def changed(policy: Policy, own: PseudoStates, place: int, context: type[PseudoContext] = PseudoContext) -> Tensor:
    """Which pseudo states [2, A] change, in any step, with the token at ``place``."""
    ids = texts()
    ids[:, place] = (ids[:, place] + 3) % 8
    difference = passed(policy, own, ids, context)[1] - passed(policy, own, None, context)[1]
    return difference.abs().amax((-2, -1)) > 1e-9


class SeesOneMore(PseudoContext):
    """An anchor sees the token after it."""

    def __init__(self, real: AttentionContext, width: int, seen: Tensor, masked: bool = False) -> None:
        super().__init__(real, width, torch.nn.functional.pad(seen, (1, 0), value=True)[..., :-1], masked)


class SeesOthers(PseudoContext):
    """A pseudo state sees those of other anchors."""

    def own(self, count: int) -> Tensor:
        return torch.ones_like(super().own(count))


@pytest.mark.parametrize("masked", slow_but([False], [False, True]))
def test_a_pseudo_state_depends_on_the_text_up_to_its_anchor_and_no_further(policy: Policy, masked: bool) -> None:
    for place in range(LENGTH):
        assert torch.equal(changed(policy, network(masked), place), place <= ANCHORS)
    for broken in (SeesOneMore, SeesOthers):
        found = [changed(policy, network(masked), place, broken) for place in range(LENGTH)]
        assert any(not torch.equal(one, place <= ANCHORS) for place, one in enumerate(found))


class Moved(PseudoStates):
    """Step 1 makes other states for its first anchor."""

    def pseudo(self, step: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        made = super().pseudo(step, hidden, anchors)
        return made if step else torch.cat([made[:, :1] + 1, made[:, 1:]], 1)


@pytest.mark.parametrize("masked", [False, True])
def test_later_steps_see_earlier_ones_of_their_anchor_unless_masked(policy: Policy, masked: bool) -> None:
    before, after = (passed(policy, network(masked, kind=kind))[1] for kind in (PseudoStates, Moved))
    moved = (before - after).abs().amax(-1) > 1e-9  # [2, A, K]
    wanted = torch.zeros(2, 4, STEPS, dtype=torch.bool)
    wanted[:, 0] = torch.tensor([True, not masked, not masked])
    assert torch.equal(moved, wanted)


# ---- F3, F5: positions, and the best that can be


class Oracle(PseudoStates):
    """The true state of token i + k instead of a guess; ``late``: that of a token further on."""

    late = 0

    def pseudo(self, step: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        return gather_rows(hidden, anchors + step + 1 + self.late)


class LateOracle(Oracle):
    late = 1


def oracle_errors(policy: Policy, own: PseudoStates, context: type[PseudoContext] = PseudoContext) -> list[float]:
    """How far the logits of each step are from the model's own at position i + k."""
    _, pseudo = passed(policy, own, context=context)
    wanted = policy.logits(frozen(policy, texts()))
    return [
        float((policy.logits(pseudo[:, :, k]) - gather_rows(wanted, ANCHORS + k + 1)).abs().max())
        for k in range(pseudo.shape[2])
    ]


@pytest.mark.parametrize("layers", [LAYERS, (1, 1, 1), (1, 4, 5)])
def test_true_states_give_the_true_distributions(policy: Policy, layers: tuple[int, ...]) -> None:
    """Without a mask this holds for every step: the earlier ones are the tokens in between."""
    assert max(oracle_errors(policy, network(layers=layers, kind=Oracle))) < 1e-10
    late = oracle_errors(policy, network(layers=layers, kind=LateOracle))
    assert min(late) > 1e-3


def test_masked_steps_miss_the_tokens_in_between(policy: Policy) -> None:
    first, *others = oracle_errors(policy, network(masked=True, kind=Oracle))
    assert first < 1e-10 and min(others) > 1e-3
    assert oracle_errors(policy, network(kind=Oracle), SeesOneMore)[0] > 1e-3


def test_position_ids_follow_the_anchor(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary embeddings are relative: an offset of all changes nothing, one of the pseudo states alone does."""
    before = passed(policy, network())[1]
    assert (passed(policy, network(), offset=7)[1] - before).abs().max() < 1e-5  # rotations are fp32
    whole = firp.network._longer

    def late(decoder, settings, later, rotary):  # type: ignore[no-untyped-def]
        return whole(decoder, settings, later, decoder.rotary_emb(rotary[0], later + 1))

    monkeypatch.setattr(firp.network, "_longer", late)
    assert (passed(policy, network())[1] - before).abs().max() > 1e-3
    assert min(oracle_errors(policy, network(layers=(2, 2, 2), kind=Oracle))) > 1e-3


# ---- F8, F9: parameters


def gradients(policy: Policy, own: PseudoStates) -> None:
    passed(policy, own)[1].square().sum().backward()  # type: ignore[no-untyped-call]


def test_gradients_reach_the_matrices_alone(policy: Policy) -> None:
    own = network()
    gradients(policy, own)
    assert all(one.weight.grad.abs().sum() > 0 for one in own.maps)  # type: ignore[union-attr, operator]
    assert all(p.grad is None for p in policy.backbone.parameters())
    open_policy = bare_policy(8, seed=4, layers=5, dtype=torch.float64)
    gradients(open_policy, network())
    reached = {name.split(".")[2] for name, p in open_policy.backbone.named_parameters() if p.grad is not None}
    assert {"2", "3", "4"} <= reached, "a backbone that is not frozen gets some"


def test_there_are_k_d_squared_parameters_and_they_begin_as_the_identity() -> None:
    own = PseudoStates(hidden_size=SIZE, layers=LAYERS)
    assert sum(p.numel() for p in own.parameters()) == STEPS * SIZE**2
    assert all(torch.equal(p, torch.eye(SIZE)) for p in own.parameters())


# ---- what does not fit


@pytest.mark.parametrize("layers", [(), (0, 1), (3, 2)])
def test_layers_that_are_not_possible(layers: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="do not fall"):
        PseudoStates(hidden_size=SIZE, layers=layers)


def test_models_that_do_not_fit(policy: Policy) -> None:
    network().check(policy)
    with pytest.raises(UserError, match=r"after layer 6, and the model has layers 1\.\.5"):
        network(layers=(6,)).check(policy)
    config = GPTNeoXConfig(
        vocab_size=8, hidden_size=SIZE, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        attn_implementation=ATTENTION,
    )  # fmt: skip
    other = Policy(backbone=GPTNeoXForCausalLM(config), tokenizer=letters(8), mtp=None, layout="mimo")
    with pytest.raises(UserError, match="GPTNeoXModel differs"):
        network(layers=(1,)).check(other)
