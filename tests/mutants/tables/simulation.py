"""Faults in virtual time."""

from tests.mutants.fault import fault

BATCH = "simulation/test_batch.py::test_events_give_what_every_single_cycle_gives"
FAULTS = (
    fault(
        "simulation/rows-beyond-slots",
        "bebop/simulation/batch.py",
        "len(self._rows) < self.slots:",
        "len(self._rows) <= self.slots:",
        BATCH,
    ),
    fault(
        "simulation/calls-taken-in-twice-a-turn",
        "bebop/simulation/batch.py",
        "self._began = bool(self._rows)",
        "pass",
        BATCH,
    ),
    fault(
        "simulation/past-a-call",
        "bebop/simulation/batch.py",
        "count = min(count, max(1, math.ceil(",
        "count = max(count, max(1, math.ceil(",
        BATCH,
    ),
    fault(
        "simulation/versions-of-later-weights",
        "bebop/simulation/batch.py",
        "len(self._loads) - 1)",
        "len(self._loads))",
        BATCH,
    ),
    fault(
        "simulation/time-stands-still",
        "bebop/simulation/virtual_time.py",
        "self.now += max(0.0, timeout)",
        "self.now += 1.0",
        "simulation/test_batch.py::test_time_jumps_to_the_next_timer_and_keeps_their_order",
    ),
    fault(
        "simulation/drafts-for-nothing",
        "bebop/simulation/costs.py",
        "+ k * (c.draft + c.draft_row * (rows - 1))",
        "",
        "simulation/test_run.py::test_speculation_pays_where_arithmetic_says",
    ),
    fault(
        "simulation/clock-of-the-wall",
        "bebop/loop.py",
        "Clock(len(workers), now)",
        "Clock(len(workers))",
        "simulation/test_run.py::test_constant_lengths_take_the_time_that_arithmetic_says",
    ),
)
