"""The lean pass gives the numbers of transformers' modules, on weights that are the modules' own."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig, ModelConfig
from bebop.model import backbone, lean
from bebop.model.attention import CausalContext, SlotContext
from bebop.model.backbone import Policy, tapped
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.lean import LeanDecoder, LeanLayer, as_modules, lean_head, lean_hidden, rotate
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import bare_policy, requests
from tests.model.families import made, rope

LENGTH = 24
KNOWN: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("llama", {"tie_word_embeddings": True, "hidden_act": "gelu"}),
    ("llama", rope("linear", factor=2.0)),
    ("qwen2", {}),  # biases of q, k and v
    ("qwen3", {}),  # norms of queries and keys
]
OTHERS: list[tuple[str, dict[str, Any]]] = [("gemma", {}), ("olmo2", {}), ("mistral", {"sliding_window": None})]


def states(policy: Policy, hidden: Any) -> Tensor:
    """Of rows in three slots, fed 4, 1 and 3 tokens at places of their own."""
    numbers = torch.Generator().manual_seed(3)
    ids = torch.randint(0, 12, (3, 8), generator=numbers)
    context = SlotContext.for_model(policy.backbone.config, 3, LENGTH, policy.embed(ids[:1, 0]))
    found, fed = [], torch.tensor([[0], [2], [5]])
    for part in ids.split([4, 1, 3], 1):
        places = fed + torch.arange(part.shape[1])
        context.place(places, LENGTH)
        found.append(hidden(part, places, context))
        fed = fed + part.shape[1]
    return torch.cat(found, 1)


@pytest.mark.parametrize("onednn", [False, True])
@pytest.mark.parametrize(("kind", "settings"), KNOWN)
@torch.no_grad()
def test_known_families_give_the_modules_states(
    kind: str, settings: dict[str, Any], onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = made(kind, **settings)
    wanted = states(policy, policy.hidden)
    if onednn:
        monkeypatch.setattr(backbone, "LARGE_MATRIX", 1)
    hidden = lean_hidden(policy, LENGTH)
    assert isinstance(hidden, LeanDecoder)
    assert torch.allclose(states(policy, hidden), wanted, atol=2e-5, rtol=2e-5)
    monkeypatch.setattr(lean, "rotate", lambda x, rotary: rotate(x, (rotary[0], -rotary[1])))
    assert not torch.allclose(states(policy, hidden), wanted, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_a_matrix_multiplies_as_a_product_does(
    dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, and by the library that its size asks for: of 64 numbers and 256 multiplications, from 4 rows on."""
    used: list[int] = []
    own = backbone.ONEDNN
    assert own is not None
    monkeypatch.setattr(backbone, "LARGE", 256)
    monkeypatch.setattr(backbone, "ONEDNN", lambda x, *rest: used.append(len(x)) or own(x, *rest))
    weight, bias = torch.randn(4, 16, dtype=dtype), torch.randn(4, dtype=dtype) if biased else None
    for rows in (1, 3, 4, 5):
        x = torch.randn(rows, 16, dtype=dtype)
        used.clear()
        assert torch.equal(backbone.Matrix(weight, bias)(x), backbone.product(x, weight, bias))
        assert used == ([rows] * 2 if rows >= 4 and dtype == torch.float32 else [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
@torch.no_grad()
def test_other_types_are_rounded_where_the_modules_round(kind: str, dtype: torch.dtype) -> None:
    policy = made(kind, dtype)
    wanted = states(policy, policy.hidden).double()
    close = 1e-10 if dtype == torch.float64 else 0.05
    assert (states(policy, lean_hidden(policy, LENGTH)).double() - wanted).abs().mean() < close * wanted.abs().mean()


@pytest.mark.parametrize(("kind", "settings"), OTHERS)
def test_other_families_run_as_their_modules(kind: str, settings: dict[str, Any]) -> None:
    policy = made(kind, **settings)
    assert lean_hidden(policy, LENGTH) == policy.hidden


@torch.no_grad()
def test_a_layer_with_another_kind_of_matrix_runs_as_its_module() -> None:
    policy = made("llama")

    class Adapted(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    policy.backbone.model.layers[1].mlp.up_proj = Adapted(32, 48, bias=False)
    assert lean_hidden(policy, LENGTH) == policy.hidden


@torch.no_grad()
def test_the_head_gives_its_modules_states() -> None:
    policy = bare_policy()
    head = policy.mtp
    assert head is not None
    given = torch.randn(2, 5, 32), torch.randn(2, 5, 32), torch.arange(5).expand(2, -1)

    def run(one: Any) -> Tensor:
        cache = SlotContext.for_model(policy.backbone.config, 2, LENGTH, given[0], layers=1)
        cache.first_layer = head.layer_index
        cache.place(given[2], LENGTH)
        return one(*given, cache)

    wanted, own = run(head), lean_head(head, LENGTH)
    assert own is not head and torch.allclose(run(own), wanted, atol=1e-5)
    head.project.weight.mul_(1.1)
    assert not torch.allclose(run(own), wanted, atol=1e-3) and torch.allclose(run(own), run(head), atol=1e-5)


@torch.no_grad()
def test_new_weights_are_seen_and_no_weight_is_held_twice() -> None:
    policy, other = bare_policy(), bare_policy(seed=1)
    before = sum(p.numel() for p in policy.backbone.parameters())
    hidden = lean_hidden(policy, LENGTH)
    again = lean_hidden(policy, LENGTH)
    assert isinstance(hidden, LeanDecoder) and isinstance(again, LeanDecoder)
    for one, two in zip(hidden.layers, again.layers, strict=True):
        assert one.qkv.weight.data_ptr() == two.qkv.weight.data_ptr()  # engines of one policy share
    held = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in policy.backbone.parameters()}
    assert sum(held.values()) == 4 * before
    policy.load(other.weights())
    assert torch.allclose(states(policy, hidden), states(other, other.hidden), atol=1e-5)
    policy.backbone.to(torch.float64)  # parameters of their own again
    assert torch.allclose(states(policy, hidden), states(policy, policy.hidden), atol=1e-5)
    assert not isinstance(hidden.layers[0].qkv.weight, torch.nn.Parameter)


def test_a_policy_can_be_trained_saved_and_copied_as_before(tmp_path: Path) -> None:
    policy = bare_policy()
    with torch.inference_mode():
        hidden = lean_hidden(policy, LENGTH)
    ids, places = torch.tensor([[1, 2, 3]]), torch.arange(3)[None]
    policy.hidden(ids, places, CausalContext()).sum().backward()
    torch.optim.SGD(policy.backbone.parameters(), lr=0.1).step()
    save_policy(policy, tmp_path)
    read = load_policy(ModelConfig(path=str(tmp_path), device="cpu"))
    twin = copy.deepcopy(policy)
    with torch.no_grad():
        wanted = states(policy, policy.hidden)
        for one in (hidden, read.hidden, lean_hidden(twin, LENGTH)):
            assert torch.allclose(states(policy, one), wanted, atol=1e-5)


@torch.no_grad()
def test_hooks_see_and_change_what_they_would_of_modules() -> None:
    policy = bare_policy()
    hidden, layers = lean_hidden(policy, LENGTH), policy.backbone.model.layers
    found = []
    for one in (policy.hidden, hidden):
        with tapped(layers, (0, -1)) as seen:
            states(policy, one)
        found.append(dict(seen))
    assert found[0].keys() == found[1].keys() == {0, -1}
    assert all(torch.allclose(found[0][layer], found[1][layer], atol=1e-5) for layer in found[0])
    doubled = layers[0].register_forward_hook(lambda _module, _inputs, out: 2 * out)
    assert torch.allclose(states(policy, hidden), states(policy, policy.hidden), atol=1e-5)
    doubled.remove()
    hook = layers[1].register_forward_pre_hook(lambda _module, inputs: (0 * inputs[0], *inputs[1:]))
    assert torch.allclose(states(policy, hidden), states(policy, policy.hidden), atol=1e-5)
    hook.remove()


@torch.no_grad()
def test_reading_states_between_layers_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bare_policy()
    hidden = lean_hidden(policy, LENGTH)
    own = states(policy, hidden)
    with tapped(policy.backbone.model.layers, (0, 1)):
        assert torch.equal(states(policy, hidden), own)
    # Bits cannot tell what ran: on some processors modules round alike.
    monkeypatch.setattr(LeanLayer, "__call__", None)
    with tapped(policy.backbone.model.layers, (0, 1)), pytest.raises(TypeError):
        states(policy, hidden)
    with as_modules():
        states(policy, hidden)


def test_an_engine_answers_as_it_does_on_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = bare_policy(dtype=torch.float64)
    asked = requests([[1, 2, 3], [4], [5, 6]], max_new_tokens=12)

    def answers(system: str) -> list[list[int]]:
        engine = TorchEngine(policy, DecodingConfig(system=system, draft_tokens=3), slots=3, max_length=32)
        return [[*answer.token_ids] for answer in generate(engine, asked)]

    for system in ("autoregressive", "bebop"):
        own = answers(system)
        with as_modules(), monkeypatch.context() as never:
            never.setattr(LeanLayer, "__call__", None)
            assert answers(system) == own
