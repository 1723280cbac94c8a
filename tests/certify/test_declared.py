"""Reported log-probs against what they are declared to be."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.declared import Mode, candidates, check_reported, declare, find_mode, tolerance
from bebop.errors import UserError

V, N, T = 16, 400, 0.7


def block(temperature: float = T, top: int = 4, narrow: bool = False, seed: int = 0) -> Block:
    """Tokens of softmax(logits / temperature) cut to the ``top`` likeliest."""
    chance = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(N, V, generator=chance, dtype=torch.float64)
    probs = (logits / temperature).softmax(-1)
    probs = torch.where(probs >= probs.topk(top).values[:, -1:], probs, 0)
    probs /= probs.sum(-1, keepdim=True)
    tokens = torch.multinomial(probs, 1, generator=chance)[:, 0]
    own: dict[str, Any] = {"probs": probs, "raw": logits.softmax(-1), "cells": tokens}
    if narrow:  # five columns and one for all others
        ids = probs.topk(5).indices
        raw = own["raw"].gather(1, ids)
        own = {
            "probs": torch.cat([probs.gather(1, ids), torch.zeros(N, 1)], 1),
            "raw": torch.cat([raw, 1 - raw.sum(1, keepdim=True)], 1),
            "ids": torch.cat([ids, torch.full((N, 1), -1)], 1),
            "cells": (ids == tokens[:, None]).int().argmax(1),
        }
    places = torch.arange(N)
    return Block(
        tokens=tokens, logprobs=probs.gather(1, tokens[:, None])[:, 0].log(), request=places // 20,
        position=places % 20, last=places, stops=(), **own,
    )  # fmt: skip


def report(one: Block, mode: Mode, temperature: float = T) -> Tensor:
    """As an engine in single precision reports it."""
    return candidates(one, temperature)[mode].float().double()


def with_reported(one: Block, reported: Tensor | None) -> Block:
    return Block(**{name: getattr(one, name) for name in one.__slots__} | {"reported": reported})


def test_the_three_modes() -> None:
    one = block()
    known = candidates(one, T)
    logits = one.raw.log()  # type: ignore[union-attr]
    at = one.tokens[:, None]
    torch.testing.assert_close(known["raw"], logits.log_softmax(-1).gather(1, at)[:, 0])
    torch.testing.assert_close(known["temperature"], (logits / T).log_softmax(-1).gather(1, at)[:, 0])
    assert known["processed"] is one.logprobs
    assert all((known["processed"] - known[mode]).abs().median() > 1e-3 for mode in ("raw", "temperature"))


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_the_mode_is_found_although_some_are_wrong(mode: Mode) -> None:
    one = block()
    reported = report(one, mode)
    reported[::25] -= 1.0
    found = find_mode(reported, candidates(one, T))
    assert found.mode == mode and found.same == (mode,) and found.distances[mode] < 1e-6
    assert min(value for other, value in found.distances.items() if other != mode) > 1e-3


def test_modes_that_are_one_are_named_together() -> None:
    plain = block(1.0, V)
    found = find_mode(report(plain, "raw", 1.0), candidates(plain, 1.0))
    assert found.mode == "processed" and set(found.same) == {"raw", "temperature", "processed"}
    hot = block(2.0, V)
    assert set(find_mode(report(hot, "temperature", 2.0), candidates(hot, 2.0)).same) == {"temperature", "processed"}


def test_an_engine_without_logprobs() -> None:
    one = block()
    assert find_mode(None, candidates(one, T)).mode == "none"
    assert find_mode(torch.full((N,), torch.nan), candidates(one, T)).mode == "none"
    silent = declare(one, "raw", T)
    assert silent.declared is None and check_reported(silent, "float32") == []
    spoken = declare(with_reported(one, report(one, "raw")), "none", T)
    assert spoken.reported is None and check_reported(spoken, "float32") == []


@pytest.mark.parametrize("mode", ["raw", "temperature", "processed"])
def test_wrong_ones_are_named(mode: Mode) -> None:
    one = block()
    right = report(one, mode)
    assert check_reported(declare(with_reported(one, right), mode, T), "float32") == []
    wrong = right.clone()
    wrong[45] -= 0.01
    wrong[7] = torch.nan  # none for this token: nothing to check
    (found,) = check_reported(declare(with_reported(one, wrong), mode, T), "float32")
    assert (found.request, found.position) == (2, 5)
    assert f"{float(wrong[45]):.4f}, but is {float(right[45]):.4f}" in str(found)


def test_single_tokens_may_be_off_in_bf16_and_one_in_fifty_may_not() -> None:
    one = block()
    reported = report(one, "raw")
    reported[::150] -= 0.6  # three of 400
    assert check_reported(declare(with_reported(one, reported), "raw", T), "bfloat16") == []
    reported[::50] -= 0.6
    assert len(check_reported(declare(with_reported(one, reported), "raw", T), "bfloat16")) >= 8
    with pytest.raises(UserError, match=r"dtype='float8'.*float32, float16, bfloat16"):
        tolerance("float8")


def test_a_reference_of_the_likeliest_tokens_knows_the_raw_ones() -> None:
    one = block(narrow=True)
    known = candidates(one, T)
    torch.testing.assert_close(known["raw"], candidates(block(), T)["raw"])
    assert "temperature" not in known
    with pytest.raises(UserError, match=r"logprobs='temperature' at temperature=0.7"):
        declare(with_reported(one, report(block(), "temperature")), "temperature", T)


@pytest.mark.parametrize(("dtype", "far", "met"), [
    ("float32", 0, True), ("float32", 1, False), ("bfloat16", 3, True), ("bfloat16", 4, False),
])  # fmt: skip
def test_a_coarse_precision_forgives_three_tokens_and_a_fine_one_none(dtype: str, far: int, met: bool) -> None:
    off = torch.zeros(32)
    off[:far] = 2 * tolerance(dtype).nats
    assert tolerance(dtype).met(off) is met
