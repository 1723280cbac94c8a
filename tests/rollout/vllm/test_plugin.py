"""What the plugin keeps of a step, from made-up ones; whether vLLM calls it is tested in tests/integration/vllm."""

from types import SimpleNamespace

import pytest
import torch

from bebop.rollout.vllm.plugin import Steps, Verified, verified

V = 7
COUNTS = [3, 0, 2]  # drafts of each request
OUT = torch.tensor([[1, 2, 5, 3], [4, -1, -1, -1], [5, -1, -1, -1]])  # all accepted; none; rejected at once


def metadata(temperatures: tuple[float, ...] = (0.5, 1.0, 2.0)) -> SimpleNamespace:
    greedy = [t == 0 for t in temperatures]
    return SimpleNamespace(
        all_greedy=all(greedy), all_random=not any(greedy), temperature=torch.tensor(temperatures)
    )  # fmt: skip


def step(steps: Steps, q: torch.Tensor | None, sampling: SimpleNamespace | None = None) -> list[Verified]:
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(3))
    drafts = torch.tensor([1, 2, 5, 6, 0], dtype=torch.int32)
    return verified(OUT, COUNTS, drafts, q, logits, sampling or metadata(), steps)


def drafted() -> torch.Tensor:
    return torch.rand(5, V, generator=torch.Generator().manual_seed(4)).softmax(-1)


def test_what_is_accepted_is_kept_of_every_step() -> None:
    for every in (0, 1):
        found = step(Steps(every=every), drafted())
        assert [(one.drafted, one.accepted, one.sampled) for one in found] == [(3, 3, True), (0, 0, True), (2, 0, True)]
        assert [bool(one.weight) for one in found] == [bool(every)] * 3


def test_measures_are_those_of_the_requests_own_rows() -> None:
    q = drafted()
    p = torch.randn(5, V, generator=torch.Generator().manual_seed(3)).softmax(-1)
    found = step(Steps(every=1), q)
    for one, rows in zip(found, (slice(0, 3), slice(3, 3), slice(3, 5)), strict=True):
        wanted = {
            "overlap": torch.minimum(p[rows], q[rows]).sum(-1),
            "target_only": p[rows].gather(-1, q[rows].argmax(-1, keepdim=True))[:, 0],
            "draft_entropy": -(q[rows] * q[rows].log()).sum(-1),
            "target_entropy": -(p[rows] * p[rows].log()).sum(-1),
        }
        assert {name: pytest.approx(values.tolist(), abs=1e-5) for name, values in wanted.items()} == one.measured


def test_looked_up_drafts_count_as_certain() -> None:
    p = torch.randn(5, V, generator=torch.Generator().manual_seed(3)).softmax(-1)
    found = step(Steps(every=1), None)
    assert not any(one.sampled for one in found)
    assert found[2].measured["overlap"] == pytest.approx([p[3, 6].item(), p[4, 0].item()], abs=1e-5)
    assert found[2].measured["draft_entropy"] == pytest.approx([0, 0], abs=1e-5)


def test_one_step_in_so_many_is_measured_and_stands_for_the_others() -> None:
    steps = Steps(every=4)
    assert [step(steps, drafted())[0].weight for _ in range(9)] == [4, 0, 0, 0, 4, 0, 0, 0, 4]


def test_greedy_requests_have_no_measures() -> None:
    mixed = step(Steps(every=1), drafted(), metadata((0.5, 1.0, 0.0)))
    assert [one.weight for one in mixed] == [1, 1, 0] and not mixed[2].measured
    greedy = Steps(every=1)
    assert [one.weight for one in step(greedy, drafted(), metadata((0.0, 0.0, 0.0)))] == [0, 0, 0]
    assert greedy.count == 0


def test_what_is_taken_is_forgotten() -> None:
    steps = Steps(kept={"a": Verified(drafted=1, accepted=1, sampled=True)})
    assert set(steps.take()) == {"a"} and steps.take() == {}
