"""What a fingerprint of weights notices."""

import pytest
import torch

from bebop.model import fingerprint as module
from bebop.model.fingerprint import fingerprint


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(5, 7, generator=generator).to(dtype) for name in ("a", "b")}


def test_equal_weights_agree_whatever_their_order_and_precision_on_the_way() -> None:
    state = weights()
    assert fingerprint(state) == fingerprint(dict(reversed(state.items()))) and len(fingerprint(state)) == 16
    narrow = {name: t.bfloat16() for name, t in state.items()}
    assert fingerprint(state, torch.bfloat16) == fingerprint(narrow) == fingerprint(narrow, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_every_change_is_noticed(dtype: torch.dtype) -> None:
    whole = weights(dtype)
    touched = {**whole, "a": whole["a"].index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(9.0, dtype=dtype))}
    zeroed = {**whole, "a": torch.zeros_like(whole["a"])}
    swapped = {"a": whole["b"], "b": whole["a"]}
    moved = {**whole, "a": whole["a"].flip(0)}
    turned = {**whole, "a": whole["a"].reshape(7, 5)}
    marks = [fingerprint(state) for state in (whole, touched, zeroed, swapped, moved, turned)]
    assert len(set(marks)) == len(marks)


def test_pieces_do_not_change_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fingerprint(weights())
    monkeypatch.setattr(module, "PIECE", 4)
    assert fingerprint(weights()) == whole
