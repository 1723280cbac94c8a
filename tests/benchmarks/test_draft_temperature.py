"""Walks over answers of the target: by hand, and against what the engine counts while it decodes."""

import pytest
import torch

from bebop.bench.draft_temperature import FIXED, Table, judged, table, walk
from bebop.config.job import DecodingConfig
from bebop.rollout.decoding.temperature import GRID, START
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trainer.chains import TokenRow
from bebop.trajectory import DecodeStats
from tests.builders import requests, tiny_policy

WHOLE = slice(0, len(GRID))


def known(rates: list[float], lengths: list[int], depth: int = 2) -> Table:
    """Every draft at a temperature of the grid is accepted at one rate, which is its overlap."""
    values = torch.tensor(rates).expand(len(lengths), max(lengths), depth, -1)
    return Table(survive=values, overlap=values, lengths=torch.tensor(lengths))


def test_a_walk_goes_on_by_what_was_accepted() -> None:
    """Two drafts: nothing accepted is a token a cycle; all of it three, the last cycle of 7 tokens having one."""
    ends = known([0.0, 1.0, 0.5, 0.0, 0.0, 0.0], [7, 3])
    assert walk(ends, 0, WHOLE) == 1.0
    assert walk(ends, 1, WHOLE) == 10 / 4
    halves = known([0.5] * len(GRID), [300] * 20)
    assert walk(halves, 2, WHOLE) == pytest.approx(1.75, abs=0.01)


def test_the_walk_of_auto_learns_within_each_answer() -> None:
    """It begins where drafts are never accepted, and soon drafts where they always are."""
    assert START not in (0, 4)
    for good in (0, 4):
        rates = [float(i == good) for i in range(len(GRID))]
        assert walk(known(rates, [2]), None, WHOLE) == 1.0
        assert walk(known(rates, [600]), None, WHOLE) > 2.9


def found(best: float, auto: float) -> dict[str, float]:
    return {str(t): 3.0 for t in FIXED} | {"0.4": best, "auto": auto}


@pytest.mark.parametrize(
    ("best", "auto", "holds"),
    [(3.2, 3.19, True), (3.2, 3.17, False), (3.2, 3.3, True), (3.005, 2.996, True), (3.005, 2.99, False)],
)
def test_the_rule_is_a_share_of_the_gain_or_next_to_nothing(best: float, auto: float, holds: bool) -> None:
    row = judged("ce", [found(best, auto)])
    assert row["holds"] == holds and row["best fixed"] == 0.4
    assert row["share"] == (None if best == 3.005 else pytest.approx((auto - 3) / 0.2))


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "other"), [("auto", 0), (0.32, 5)])
def test_a_walk_finds_what_the_engine_counts(temperature: float | str, other: int) -> None:
    """On answers that were decoded plainly; what another temperature would give is farther off."""
    policy = tiny_policy(seed=1)
    asked = requests([[1, 2, 3], [4, 5, 6, 7], [9]] * 50, max_new_tokens=40)
    text = generate(TorchEngine(policy, DecodingConfig(system="autoregressive"), slots=50), asked)
    rows = [TokenRow(prompt=r.token_ids, answer=tuple(a.token_ids.tolist())) for r, a in zip(asked, text, strict=True)]
    drafting = DecodingConfig(draft_tokens=3, draft_temperature=temperature)  # type: ignore[arg-type]
    stats = sum((a.stats for a in generate(TorchEngine(policy, drafting, slots=50), asked)), DecodeStats())
    made = table(policy, rows, 3, GRID)
    walked = walk(made, None if temperature == "auto" else 0, WHOLE, walks=4)
    assert walked == pytest.approx(stats.accept_length, abs=0.04)
    assert abs(walk(made, other, WHOLE, walks=4) - stats.accept_length) > 0.08
