"""What simulated workers report, and when: as ``RolloutWorker`` does."""

import asyncio
from collections import Counter

import pytest

from bebop.config.fields import from_dict
from bebop.config.simulate import SimulateConfig
from bebop.driver.protocols import LINGER_SECONDS, Assignment
from bebop.simulation.parts import Completions, SimulatedWorker, prompt
from bebop.simulation.run import run_virtually, simulate

SIZE = 4
COSTS = {"cycle": 1.0, "row": 0.0, "prefill": 0.0, "report": 0.0}
Report = tuple[float, list[tuple[int, tuple[int, ...]]]]  # when, and (prompt, members)


class Given(Completions):
    """Of lengths that are known: of each prompt the same."""

    def draw(self, index: int) -> list[tuple[int, int]]:
        return [(10, 10), (20, 20), (30, 30), (40, 40)]


def reports(slots: int, prompts: int, pulls: bool) -> list[Report]:
    """All that a worker says until everything is answered; a second for each cycle."""
    sections = {"fleet": {"slots": slots, "group_size": SIZE}, "completions": {"draft_tokens": 0}, "costs": COSTS}
    config = from_dict(SimulateConfig, sections)

    async def collect() -> list[Report]:
        worker, found, seen, left = SimulatedWorker(config, Given(config), pulls=pulls), [], 0, prompts * SIZE
        await worker.submit([Assignment(prompt=prompt(i), members=tuple(range(SIZE))) for i in range(prompts)])
        while left:
            report = await worker.collect(seen)
            assert report == await worker.collect(seen), "sent again until it is acknowledged"
            seen = report.number
            parts = [(part.prompt.index, part.members) for part in report.parts]
            assert all(len(part.members) == len(part.trajectories) for part in report.parts)
            found.append((asyncio.get_running_loop().time(), parts))
            left -= sum(len(members) for _, members in parts)
        return found

    return run_virtually(collect())


def test_a_free_slot_has_single_answers_told_after_a_moment() -> None:
    at, report = zip(*reports(slots=4, prompts=1, pulls=True), strict=True)
    assert at == pytest.approx([10 + LINGER_SECONDS, 20 + LINGER_SECONDS, 30 + LINGER_SECONDS, 40])
    assert report == ([(0, (0,))], [(0, (1,))], [(0, (2,))], [(0, (3,))])


def test_without_a_free_slot_a_groups_worth_is_told_and_nothing_waits_for_its_own_group() -> None:
    """Four slots, sixteen answers: while others wait, four ended answers make a report, of whichever groups."""
    found = reports(slots=4, prompts=4, pulls=True)
    answers = Counter((index, member) for _, parts in found for index, members in parts for member in members)
    assert answers == Counter((index, member) for index in range(4) for member in range(SIZE))
    at, first = found[0]
    assert at < 40 and sum(len(members) for _, members in first) >= SIZE
    assert all(len(members) < SIZE for _, members in first), "no group is whole"


def test_where_prompts_have_a_fixed_order_groups_are_told_whole() -> None:
    found = reports(slots=4, prompts=3, pulls=False)
    assert [members for _, parts in found for _, members in parts] == [tuple(range(SIZE))] * 3


def test_workers_that_report_at_one_moment_share_what_goes_out_then() -> None:
    """Both fill their slots: ten cycles a step. Were the first that is heard given all there is, the other had gaps."""
    sections = {
        "fleet": {"workers": 2, "slots": 8, "group_size": SIZE, "groups_per_step": 4, "steps": 8, "staleness": 1},
        "completions": {"lengths": [10], "draft_tokens": 0},
        "costs": {**COSTS, "update": 3.0, "update_token": 0.0, "weights": 0.0, "fetch": 0.0, "load": 0.0, "step": 0.0},
    }
    assert simulate(from_dict(SimulateConfig, sections)).step_seconds == pytest.approx(10.0, abs=1e-6)
