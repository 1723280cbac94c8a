"""Trained parts: what is written comes back, and what does not belong to the model is refused in one line."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model import fingerprint as module
from bebop.model.backbone import Policy
from bebop.model.fingerprint import fingerprint
from bebop.model.parts import PartCard, backbone_fingerprint, card_of, find_part, load_part, save_part
from bebop.systems import PARTS
from bebop.systems.base import AuxModel
from tests.builders import tiny_policy

NAME = "scorer"


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A part whose network is a linear layer."""
    monkeypatch.setitem(PARTS, NAME, AuxModel(name=NAME, summary="", job=lambda: None, network=lambda: nn.Linear))


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(seed=1)


@pytest.fixture
def saved(policy: Policy, tmp_path: Path) -> Path:
    path = tmp_path / "scorer.safetensors"
    settings = {"in_features": 3, "out_features": 2}
    card = PartCard(part=NAME, settings=settings, backbone=backbone_fingerprint(policy), data={}, seed=0, command="",
                    results={})  # fmt: skip
    torch.manual_seed(0)
    save_part(path, nn.Linear(3, 2), card)
    return path


def rewritten(path: Path, **fields: object) -> None:
    card_of(path).write_text(json.dumps(json.loads(card_of(path).read_text()) | fields))


def test_a_part_comes_back_as_it_was_written(policy: Policy, saved: Path) -> None:
    torch.manual_seed(0)
    own, read = nn.Linear(3, 2), load_part(NAME, saved, policy)
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), read.parameters(), strict=True))
    assert not read.training and not any(p.requires_grad for p in read.parameters())


def test_a_part_of_another_backbone_is_refused(policy: Policy, saved: Path) -> None:
    weight = next(policy.backbone.parameters())
    with torch.no_grad():
        weight[0, 0] *= 1.5
    with pytest.raises(UserError, match=r"model\.parts\.scorer=.* made for another model; make one with .*part=scorer"):
        load_part(NAME, saved, policy)


def test_the_precision_of_the_backbone_does_not_matter(policy: Policy, saved: Path) -> None:
    policy.backbone.to(torch.bfloat16)
    load_part(NAME, saved, policy)


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"part": "pivot"}, "the file holds the part 'pivot'"),
        ({"settings": {"in_features": 4, "out_features": 2}}, "cannot be loaded: .*size mismatch"),
        ({"settings": {"width": 4}}, "cannot be loaded: .*width"),
        ({"more": 1}, "cannot be read as the card of a trained part"),
    ],
)
def test_files_that_do_not_fit(policy: Policy, saved: Path, fields: dict[str, object], word: str) -> None:
    rewritten(saved, **fields)
    with pytest.raises(UserError, match=word):
        load_part(NAME, saved, policy)


def test_weights_that_are_none(policy: Policy, saved: Path) -> None:
    saved.write_bytes(b"\0" * 10)
    with pytest.raises(UserError, match="cannot be loaded"):
        load_part(NAME, saved, policy)


def test_a_missing_part_names_the_command_that_makes_it() -> None:
    with pytest.raises(UserError, match=r"model\.parts\.scorer is missing.*python -m bebop\.adapt part=scorer"):
        find_part(ModelConfig(), NAME)


def test_a_given_file_needs_its_card(saved: Path) -> None:
    config = dataclasses.replace(ModelConfig(), parts={NAME: str(saved)})
    assert find_part(config, NAME) == saved
    card_of(saved).unlink()
    with pytest.raises(UserError, match=r"that has its \.json"):
        find_part(config, NAME)


# ---- What a fingerprint of weights notices


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pieces_do_not_change_it(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Each element's bits count times its place, from 1, which begins again after each period."""
    long = torch.randn(3 * module.PERIOD + 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole, bits = fingerprint({"a": long}), long.view(module.BITS[long.element_size()]).tolist()
    wanted = sum(bit * (place % module.PERIOD + 1) for place, bit in enumerate(bits)) % (1 << 64)
    for periods in (1, 2, 512):
        monkeypatch.setattr(module, "PERIODS", periods)
        assert module._sum(long) == wanted and fingerprint({"a": long}) == whole
