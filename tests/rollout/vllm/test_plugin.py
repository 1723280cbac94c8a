"""What the plugin keeps of a step, from made-up ones; whether vLLM calls it is tested in tests/integration/vllm."""

from types import SimpleNamespace

import pytest
import torch

from bebop.rollout.vllm import runner_v1, runner_v2, steps
from bebop.rollout.vllm.steps import Rows, StepRecord, Steps, Verified

V = 7
COUNTS = [3, 0, 2]  # drafts of each request
OUT = torch.tensor([[1, 2, 5, 3], [4, -1, -1, -1], [5, -1, -1, -1]])  # all accepted; none; rejected at once
DRAFTED = torch.tensor([1, 2, 5, 6, 0], dtype=torch.int32)
RUNNERS = ("v1", "v2")
TEMPERATURES = (0.5, 1.0, 2.0)


def target() -> torch.Tensor:
    return torch.randn(5, V, generator=torch.Generator().manual_seed(3))


def drafted() -> torch.Tensor:
    return torch.rand(5, V, generator=torch.Generator().manual_seed(4)).softmax(-1)


def first(steps: Steps, q: torch.Tensor | None, temperatures: tuple[float, ...]) -> Rows:
    """The step as the first model runner verifies it: processed logits and distributions of the drafts alone."""
    greedy = [t == 0 for t in temperatures]
    sampling = SimpleNamespace(
        all_greedy=all(greedy), all_random=not any(greedy), temperature=torch.tensor(temperatures)
    )  # fmt: skip
    return runner_v1.rows(OUT, COUNTS, DRAFTED, q, target(), sampling, steps)


def second(steps: Steps, q: torch.Tensor | None, temperatures: tuple[float, ...]) -> Rows:
    """The same step in the second: a row more for each request, its slots in disorder, and raw logits of drafts."""
    slots, places = torch.tensor([4, 0, 2]), [range(3), range(3, 3), range(3, 5)]
    bonus = torch.full((1, V), 9.0)
    heat = torch.zeros(6)
    heat[slots] = torch.tensor(temperatures)
    raw = torch.full((6, 3, V), float("nan"))  # slots of others, and places that were not drafted
    for slot, own in zip(slots.tolist(), places, strict=True):
        for place, row in enumerate(own):
            raw[slot, place] = q[row].log() * (heat[slot] or 1) if q is not None else 0
    ids = [[3, *DRAFTED[list(own)].tolist()] for own in places]  # a token that is written leads each request's drafts
    given = {
        "target_logits": torch.cat([torch.cat([target()[list(own)], bonus]) for own in places]),
        "draft_logits": None if q is None else raw,
        "draft_sampled": torch.tensor([token for own in ids for token in own]),
        "cu_num_logits": torch.tensor([0, 4, 5, 8], dtype=torch.int32),
        "idx_mapping": slots,
        "expanded_idx_mapping": slots.repeat_interleave(torch.tensor([4, 1, 3])),
        "expanded_local_pos": torch.tensor([0, 1, 2, 3, 0, 0, 1, 2], dtype=torch.int32),
        "temperature": heat,
    }
    return runner_v2.rows((OUT >= 0).sum(-1), given, steps)


def step(
    runner: str, steps: Steps, q: torch.Tensor | None, temperatures: tuple[float, ...] = TEMPERATURES
) -> list[Verified]:
    return {"v1": first, "v2": second}[runner](steps, q, temperatures).verified()


@pytest.mark.parametrize("runner", RUNNERS)
def test_what_is_accepted_is_kept_of_every_step(runner: str) -> None:
    for every in (0, 1):
        found = step(runner, Steps(every=every), drafted())
        assert [(one.drafted, one.accepted, one.sampled) for one in found] == [(3, 3, True), (0, 0, True), (2, 0, True)]
        assert [bool(one.weight) for one in found] == [bool(every)] * 3


@pytest.mark.parametrize("size", [steps.SLICE, 2 * V])
@pytest.mark.parametrize("runner", RUNNERS)
def test_measures_are_those_of_the_requests_own_rows(runner: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one slice, and two rows at a time."""
    monkeypatch.setattr(steps, "SLICE", size)
    q, p = drafted(), target().softmax(-1)
    found = step(runner, Steps(every=1), q)
    for one, rows in zip(found, (slice(0, 3), slice(3, 3), slice(3, 5)), strict=True):
        wanted = {
            "overlap": torch.minimum(p[rows], q[rows]).sum(-1),
            "target_only": p[rows].gather(-1, q[rows].argmax(-1, keepdim=True))[:, 0],
            "draft_entropy": -(q[rows] * q[rows].log()).sum(-1),
            "target_entropy": -(p[rows] * p[rows].log()).sum(-1),
        }
        assert {name: pytest.approx(values.tolist(), abs=1e-5) for name, values in wanted.items()} == one.measured


@pytest.mark.parametrize("runner", RUNNERS)
def test_looked_up_drafts_count_as_certain(runner: str) -> None:
    p = target().softmax(-1)
    found = step(runner, Steps(every=1), None)
    assert not any(one.sampled for one in found)
    assert found[2].measured["overlap"] == pytest.approx([p[3, 6].item(), p[4, 0].item()], abs=1e-5)
    assert found[2].measured["draft_entropy"] == pytest.approx([0, 0], abs=1e-5)


@pytest.mark.parametrize("runner", RUNNERS)
def test_one_step_in_so_many_is_measured_and_stands_for_the_others(runner: str) -> None:
    steps = Steps(every=4)
    assert [step(runner, steps, drafted())[0].weight for _ in range(9)] == [4, 0, 0, 0, 4, 0, 0, 0, 4]


@pytest.mark.parametrize("runner", RUNNERS)
def test_greedy_requests_have_no_measures(runner: str) -> None:
    mixed = step(runner, Steps(every=1), drafted(), (0.5, 1.0, 0.0))
    assert [one.weight for one in mixed] == [1, 1, 0] and not mixed[2].measured
    greedy = Steps(every=1)
    assert [one.weight for one in step(runner, greedy, drafted(), (0.0, 0.0, 0.0))] == [0, 0, 0]
    assert greedy.count == 0 or runner == "v2"  # whose host does not know


def record(steps: Steps, *names: str) -> StepRecord:
    steps.parts = [first(steps, drafted(), TEMPERATURES)]
    return steps.launch(names)


def test_a_step_is_that_whose_tokens_came_out_and_is_forgotten() -> None:
    steps = Steps(every=1)
    early, late = record(steps, "a", "b", "c"), record(steps, "d", "e", "f")
    assert (early.number, late.number, steps.launches) == (0, 1, 2) and steps.take().verified() == {}
    steps.done.append(early)
    assert set(steps.take().verified()) == {"a", "c"} and steps.take().number == -1  # nothing was drafted for b


def test_rows_of_other_ranks_are_nobodys() -> None:
    assert record(Steps(every=1), "a", "b").verified() == {}
