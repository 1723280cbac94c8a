"""The rollout worker on the real engine: whole groups, seeds, reports, rewards that raise or hang, errors that rise."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, EvaluationConfig, JobConfig, TaskConfig
from bebop.driver.protocols import Assignment, Pace, WorkerReport
from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.model.backbone import Policy
from bebop.monitor.estimators import rollout_metrics
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker
from bebop.tasks.functions import RewardTimeout
from bebop.tasks.rewards import Answer, HeldOutReward, Outcome, RewardFunction, Score, Scorer, checked, make_reward
from bebop.trajectory import Group, Prompt, SamplingParams
from tests.builders import bare_policy, oldest_version

SIZE, LONGEST = 3, 12
LAST = 10**6  # all reports so far have arrived


def prompt(index: int) -> Prompt:
    ids = tuple((index * 5 + j) % 11 for j in range(2 + index % 3))
    return Prompt(index=index, task="test", text=str(ids), token_ids=ids, item={"answer": str(index)})


def exact(seed: int = 0) -> Policy:
    """In float64, so that rounding in batches of other sizes cannot change a token."""
    return bare_policy(seed=seed, dtype=torch.float64)


def length_reward(text: str, asked: Prompt) -> float:
    return len(text) + 100.0 * asked.index


def worker(
    reward: RewardFunction = length_reward,
    seed: int = 0,
    slots: int = 4,
    policy: Policy | None = None,
    dispatch: str = "static",
    **more: dict[str, Any],
) -> RolloutWorker:
    sections: dict[str, dict[str, Any]] = {
        "rollout": {"sampling": {"max_new_tokens": LONGEST}, "dispatch": dispatch},
        "trainer": {"group_size": SIZE},
        "runtime": {"seed": seed},
        **more,
    }
    config = from_dict(JobConfig, sections)
    engine = TorchEngine(policy or exact(), DecodingConfig(draft_tokens=2), slots=slots, max_length=32)
    return RolloutWorker(engine, reward, config, eos=(11,))


@pytest.fixture
def running() -> Iterator[Callable[..., RolloutWorker]]:
    """Return what starts a worker's thread, which is stopped at the end, whatever happens."""
    workers: list[RolloutWorker] = []

    def run(*args: Any, begin: bool = True, **more: dict[str, Any]) -> RolloutWorker:
        workers.append(worker(*args, **more))
        if begin:
            workers[-1].start()
        return workers[-1]

    yield run
    for one in workers:
        one.stop()


def submit(one: RolloutWorker, prompts: Sequence[Prompt]) -> None:
    """Ask for whole groups."""
    one.submit([Assignment(prompt=asked, members=tuple(range(SIZE))) for asked in prompts])


def wholes(report: WorkerReport) -> dict[int, Group]:
    assert all(part.members == tuple(range(SIZE)) for part in report.parts)
    return {part.prompt.index: Group(prompt=part.prompt, trajectories=part.trajectories) for part in report.parts}


def collect(one: RolloutWorker, timeout: float) -> dict[int, Group]:
    """The groups of the next report, all before it having arrived."""
    return wholes(one.collect(timeout, LAST))


def finish(one: RolloutWorker, count: int) -> dict[int, Group]:
    """Turn the worker by hand until ``count`` groups are done."""
    done: dict[int, Group] = {}
    for _ in range(500):
        if len(done) == count:
            break
        one.turn()
        done |= collect(one, 0)
    assert len(done) == count and not one.engine.unfinished
    return done


def tokens(group: Group) -> list[list[int]]:
    return [t.completion.token_ids.tolist() for t in group.trajectories]


def test_groups_are_complete_and_rewarded() -> None:
    one = worker()
    asked = [prompt(i) for i in (4, 0, 7)]
    submit(one, asked[:2])  # two prompts, as a tuple of two, are not taken for weights
    submit(one, asked[2:])
    done = finish(one, 3)
    assert {i: g.prompt for i, g in done.items()} == {p.index: p for p in asked}
    for index, group in done.items():
        assert len(group.trajectories) == SIZE
        for trajectory in group.trajectories:
            answer = trajectory.completion
            assert trajectory.reward == len(answer.text) + 100.0 * index
            assert answer.finish_reason == ("stop" if answer.token_ids[-1] == 11 else "length")
            assert len(answer.token_ids) == LONGEST or answer.finish_reason == "stop"
        assert len({tuple(t) for t in tokens(group)}) > 1  # the completions of a group are not copies


@pytest.mark.slow
def test_completions_depend_on_job_seed_and_number_only() -> None:
    """The same completions whichever prompts are beside them, in whatever order and however many slots."""
    together = worker(slots=7)
    submit(together, [prompt(i) for i in range(5)])
    all_of_them = finish(together, 5)
    for order in ([3], [4, 3, 1]):
        few = worker(slots=2)
        submit(few, [prompt(i) for i in order])
        some = finish(few, len(order))
        assert {i: tokens(g) for i, g in some.items()} == {i: tokens(all_of_them[i]) for i in order}
    other = worker(seed=1)
    submit(other, [prompt(3)])
    assert tokens(finish(other, 1)[3]) != tokens(all_of_them[3])


def test_seeds_differ_for_all_completions_and_jobs() -> None:
    seeds = {worker(seed=s)._params(n).seed for s in (0, 1, (1 << 23) - 1) for n in (0, 1, 2, 10**6)}
    assert len(seeds) == 12 and max(seeds) < 2**63  # fits the engine's 64-bit tensors


def test_completions_of_an_evaluation_have_a_distribution_seeds_and_a_reward_of_their_own() -> None:
    one = worker()
    held_out = {"every": 1, "samples": 2, "temperature": 0.5}
    one.config = replace(one.config, evaluation=from_dict(EvaluationConfig, held_out))
    requests = [one._request(replace(prompt(3), index=index), member) for index in (-1, -2) for member in range(3)]
    assert [r.params.temperature for r in requests] == [0.0, 0.5, 0.5] * 2 and not any(r.trace for r in requests)
    seeds = [r.params.seed for r in requests]
    assert seeds == list(range(seeds[0], seeds[0] + 6)) and seeds[0] == 1 << 39
    assert one._request(prompt(0), 0).params.temperature == 1.0
    jobs = {worker(seed=s)._request(replace(prompt(3), index=-1), 0).params.seed >> 40 for s in (0, 1, 5)}
    assert jobs == {0, 1, 5}, "within the seeds of its job"
    one.config = replace(one.config, evaluation=from_dict(EvaluationConfig, {"every": 1, "greedy": False}))
    assert one._request(replace(prompt(3), index=-1), 0).params.temperature == 1.0


def test_greedy_completions_beside_sampled_ones_are_those_of_the_target() -> None:
    """In one batch, with drafts: the first member is what plain greedy decoding gives."""
    one = worker(slots=8)
    one.config = replace(one.config, evaluation=from_dict(EvaluationConfig, {"every": 1, "samples": 2}))
    asked = [replace(prompt(3 + place), index=-1 - place) for place in range(3)]
    one.submit([Assignment(prompt=p, members=(0, 1, 2)) for p in asked])
    submit(one, [prompt(0), prompt(1)])
    done = {}
    while len(done) < 5:
        one.turn()
        done |= {part.prompt.index: part for part in one.collect(0, LAST).parts}
    plain = TorchEngine(exact(), DecodingConfig(system="autoregressive", draft_tokens=0), slots=4, max_length=32)
    for p in asked:
        params = SamplingParams(temperature=0.0, max_new_tokens=LONGEST, stop_token_ids=(11,))
        plain.add(Request(id=-p.index, token_ids=p.token_ids, params=params))
    ended: dict[int, list[int]] = {}
    while plain.unfinished:
        ended |= {-f.id: f.completion.token_ids.tolist() for f in plain.step()}
    greedy = {p.index: done[p.index].trajectories[0] for p in asked}
    assert {index: t.completion.token_ids.tolist() for index, t in greedy.items() if t is not None} == ended


def test_weights_come_before_prompts_submitted_later_and_in_flight_for_earlier_ones() -> None:
    one, other = worker(), exact(seed=5)
    submit(one, [prompt(0)])
    one.turn()
    one.set_weights({n: w.detach().clone() for n, w in other.weights().items()}, 3)
    submit(one, [prompt(1)])
    done = finish(one, 2)
    straddling = [t.completion.versions.tolist() for t in done[0].trajectories]
    assert all(v[0] == 0 and v == sorted(v) and set(v) <= {0, 3} for v in straddling)
    assert any(v[-1] == 3 for v in straddling)
    assert all((t.completion.versions == 3).all() for t in done[1].trajectories)
    assert oldest_version(done[0]) == 0 and oldest_version(done[1]) == 3
    # And they are the new weights: a worker that starts with them gives the same completions to the later prompt.
    fresh = worker()
    fresh.set_weights({n: w.detach().clone() for n, w in other.weights().items()}, 3)
    submit(fresh, [prompt(1)])
    assert tokens(finish(fresh, 1)[1]) == tokens(done[1])


def test_reports_count_tokens_and_seconds_once() -> None:
    one = worker()
    one.set_weights({}, 1)
    submit(one, [prompt(0), prompt(1)])
    began, total, busy, swap, groups = time.perf_counter(), 0, 0.0, 0.0, []
    while one.engine.unfinished or not groups:
        one.turn()
        report = one.collect(0, LAST)
        total, busy, swap = total + report.tokens, busy + report.busy, swap + report.swap
        groups += wholes(report).values()
    assert total == sum(len(t) for g in groups for t in tokens(g))
    assert 0 < swap < busy < time.perf_counter() - began
    again = one.collect(0, LAST)
    assert (again.parts, again.tokens, again.busy, again.swap) == ((), 0, 0.0, 0.0)


def test_a_report_is_told_again_until_it_was_acknowledged() -> None:
    """Else a completion whose report is lost on its way is lost with it."""
    one = worker()
    submit(one, [prompt(0), prompt(1)])
    first = one.collect(0, 0)
    assert (first.number, first.parts) == (1, ())
    for _ in range(60):
        one.turn()
    assert one.collect(0, 0) is first, "it may not have arrived"
    second = one.collect(0, 1)
    assert second.number == 2 and {part.prompt.index for part in second.parts} == {0, 1}
    assert one.collect(0, 1) is second and one.collect(0, 2).parts == ()


def test_members_of_a_group_are_the_same_wherever_they_are_decoded() -> None:
    whole, half = worker(), worker()
    submit(whole, [prompt(3)])
    half.submit([Assignment(prompt=prompt(3), members=(2, 0))])
    for _ in range(60):
        half.turn()
    (part,) = half.collect(0, 0).parts
    every = tokens(finish(whole, 1)[3])
    assert part.members == (2, 0)
    assert [t.completion.token_ids.tolist() for t in part.trajectories] == [every[2], every[0]]


def test_a_thread_works_until_it_is_stopped(running: Callable[..., RolloutWorker]) -> None:
    before = set(threading.enumerate())
    one = running()
    (thread,) = set(threading.enumerate()) - before
    submit(one, [prompt(0)])
    submit(one, [prompt(1)])
    done: dict[int, Group] = {}
    while len(done) < 2:
        done |= collect(one, 5)
    by_hand = worker()
    submit(by_hand, [prompt(0), prompt(1)])
    assert {i: tokens(g) for i, g in done.items()} == {i: tokens(g) for i, g in finish(by_hand, 2).items()}
    one.stop()
    thread.join(5)
    assert not thread.is_alive()


def test_collect_waits_as_long_as_it_is_told(running: Callable[..., RolloutWorker]) -> None:
    one = running()
    began = time.perf_counter()
    assert collect(one, 0.1) == {}
    assert 0.09 < time.perf_counter() - began < 2
    submit(one, [prompt(0)])
    began = time.perf_counter()
    assert list(collect(one, 60)) == [0]  # comes back when there is something
    assert time.perf_counter() - began < 20


def test_a_prompt_that_cannot_fit_is_raised_by_collect(running: Callable[..., RolloutWorker]) -> None:
    one = running()
    submit(one, [Prompt(index=0, task="test", text="", token_ids=tuple([1] * 30), item={})])
    with pytest.raises(UserError, match="exceeds max_length=32"):
        one.collect(10, LAST)


def test_decoding_changes_in_order_with_prompts_and_weights() -> None:
    one = worker()
    submit(one, [prompt(0)])
    one.turn()
    one.configure(DecodingConfig(system="target_only", draft_tokens=1))
    submit(one, [prompt(1)])
    done = finish(one, 2)
    assert one.engine.decoding.system == "target_only"  # type: ignore[attr-defined]
    work = [
        [(t.completion.stats.draft_forwards, t.completion.stats.cycles) for t in done[i].trajectories] for i in (0, 1)
    ]
    assert all(forwards == cycles for forwards, cycles in work[1])
    assert all(forwards == cycles + 1 for forwards, cycles in work[0])  # the first cycle had two drafts


def test_reports_name_weights_and_head_together() -> None:
    one, other = worker(), exact(seed=5)
    start = one.collect(0, LAST)
    assert (start.version, start.head) == (0, one.engine.head)
    one.set_weights({n: w.detach().clone() for n, w in other.weights(mtp=True).items()}, 4)
    assert one.collect(0, LAST).version == 0, "queued is not taken in"
    one.turn()
    report = one.collect(0, LAST)
    assert report.version == 4 and report.head == one.engine.head != start.head


def test_an_engine_knows_past_completions_before_it_begins_with_their_prompt() -> None:
    """They come with the assignment; what is not told of leaves what is known."""
    one = worker()
    heard: list[tuple[str, tuple[int, ...]]] = []
    engine = one.engine
    assert isinstance(engine, TorchEngine)
    remember, add = engine.remember, engine.add
    engine.remember = lambda ids, past: (heard.append(("told", tuple(ids))), remember(ids, past))[1]  # type: ignore[method-assign]
    engine.add = lambda asked: (heard.append(("asked", asked.token_ids)), add(asked))[1]  # type: ignore[method-assign]
    past = (np.array([1, 2], dtype=np.int32), np.array([3], dtype=np.int32))
    told, other = prompt(0), prompt(1)
    one.submit([Assignment(prompt=told, members=(0,), past=past), Assignment(prompt=other, members=(0,))])
    one.turn()
    assert heard == [("told", told.token_ids), ("asked", told.token_ids), ("asked", other.token_ids)]
    assert engine.slots.history.of(told.token_ids).tokens == 5, "with a mark before each"


# ---- reports before a whole group is done


def test_where_prompts_are_pulled_completions_go_before_the_rest_of_theirs() -> None:
    """So that whoever hands out prompts sees room; each completion is told once."""
    pulled, whole = worker(dispatch="pull", slots=2), worker(slots=2)
    for one in (pulled, whole):
        submit(one, [prompt(0), prompt(1)])
    told: dict[tuple[int, int], list[int]] = {}
    sizes = []
    for _ in range(80):
        pulled.turn()
        for part in pulled.collect(0, LAST).parts:
            sizes.append(len(part.members))
            for member, one_answer in zip(part.members, part.trajectories, strict=True):
                assert (part.prompt.index, member) not in told
                told[part.prompt.index, member] = one_answer.completion.token_ids.tolist()
    every = {i: tokens(group) for i, group in finish(whole, 2).items()}
    assert told == {(i, member): every[i][member] for i in (0, 1) for member in range(SIZE)}
    assert min(sizes) < SIZE


def test_the_pace_of_rewards_is_told(running: Callable[..., RolloutWorker]) -> None:
    """A reward that does not come back shows as silence, and stops showing once it does."""
    held, called = threading.Event(), threading.Event()

    def slow(text: str, asked: Prompt) -> float:
        called.set()
        assert held.wait(20)
        return 0.0

    one = running(slow, begin=False)

    def pace() -> Pace:
        return next(pace for pace in one.collect(0, LAST).paces if pace.name == "reward")

    assert (pace().silent, pace().slowest, pace().limit) == (0.0, 0.0, one.config.task.reward_timeout)
    one.start()
    submit(one, [prompt(0)])
    assert called.wait(20)
    first, second = pace().silent, pace().silent
    assert 0 < first < second
    held.set()
    while not one.collect(5, LAST).parts:
        pass
    assert pace().silent == 0.0 and pace().slowest > first


def test_the_pace_of_a_held_out_reward_has_the_limit_of_its_own_task(running: Callable[..., RolloutWorker]) -> None:
    """Else a worker whose held-out questions have a slower reward is replaced as one that hangs."""
    held, called = threading.Event(), threading.Event()

    def slow(text: str, asked: Prompt) -> float:
        called.set()
        assert held.wait(20)
        return 0.0

    one = running(slow, evaluation={"every": 1, "samples": 2, "task": {"reward_timeout": 150.0}})
    for asked, limit in ((replace(prompt(3), index=-1), 150.0), (prompt(0), 30.0)):
        held.clear(), called.clear()
        submit(one, [asked])
        assert called.wait(20)
        assert next(pace.limit for pace in one.collect(0, LAST).paces if pace.name == "reward") == limit
        held.set()
        while not one.collect(5, LAST).parts:
            pass


# ---- rewards


def test_what_a_reward_raises_is_raised_by_collect(running: Callable[..., RolloutWorker]) -> None:
    def fails(text: str, asked: Prompt) -> float:
        raise UserError(f"reward on prompt {asked.index}")

    one = running(fails)
    submit(one, [prompt(2)])
    for _ in range(2):  # every time: the worker does nothing any more
        with pytest.raises(UserError, match="reward on prompt 2"):
            one.collect(10, LAST)


def test_a_reward_that_hangs_holds_up_nobody_and_is_counted(running: Callable[..., RolloutWorker]) -> None:
    """Decoding goes on while a reward is computed; one that hung gives 0, marked, and the metric counts it."""
    release, waiting = threading.Event(), threading.Event()

    def slow(text: str, asked: Prompt) -> float:
        if asked.index == 0:
            waiting.set()
            release.wait(20)
            raise RewardTimeout("reward mine on prompt 0 took more than task.reward_timeout=1 s")
        return 1.0

    one = running(slow)
    submit(one, [prompt(0)])
    assert waiting.wait(20)
    submit(one, [prompt(1)])
    one.thread.configure(DecodingConfig(draft_tokens=2)).result(20)  # after the second prompt
    for _ in range(200):
        if not one.engine.unfinished:
            break
        time.sleep(0.05)
    assert not one.engine.unfinished and collect(one, 0) == {}  # all is decoded, and nothing rewarded yet
    release.set()
    done: dict[int, Group] = {}
    while len(done) < 2:
        done |= collect(one, 10)
    assert [(t.reward, t.timed_out) for t in done[0].trajectories] == [(0.0, True)] * SIZE
    assert [(t.reward, t.timed_out) for t in done[1].trajectories] == [(1.0, False)] * SIZE
    assert values(rollout_metrics(list(done.values())))["reward/timeouts"] == SIZE


class Counted(Scorer):
    """Rewards the number of tokens."""

    name = "counted"

    def outcomes(self, answers: Sequence[Answer]) -> list[Outcome]:
        assert all(answer.token_ids is not None for answer in answers)
        return [Score(value=float(len(answer.token_ids or ()))) for answer in answers]


def test_a_reward_knows_the_tokens_of_a_completion() -> None:
    one = worker(Counted())
    submit(one, [prompt(0)])
    group = finish(one, 1)[0]
    assert [t.reward for t in group.trajectories] == [len(t.completion.token_ids) for t in group.trajectories]


ASYNC = """
import asyncio
together = most = 0
async def judge(text, item):
    global together, most
    together, most = together + 1, max(most, together + 1)
    await asyncio.sleep(0.01)
    together -= 1
    return {"score": len(text), "most": most, "index": int(item["answer"])}
"""


def test_an_async_reward_takes_batches_up_to_the_limit(tmp_path: Path) -> None:
    """All completions that wait, in a process of its own; none is left over, and each has its own parts."""
    (tmp_path / "mine.py").write_text(ASYNC)
    task = from_dict(TaskConfig, {"reward": f"{tmp_path}/mine.py:judge", "reward_batch": 4})
    reward = make_reward(task)
    one = worker(reward, slots=9)
    one.config = replace(one.config, task=task)
    held = threading.Event()
    one._rewards.submit(held.wait, 20)  # so that all completions wait
    submit(one, [prompt(index) for index in range(3)])
    while one.engine.unfinished or one.thread.progress().busy == 0:
        one.thread.turn()
    held.set()
    done = finish(one, 3)
    parts = [t.parts for group in done.values() for t in group.trajectories]
    assert max(part["most"] or 0 for part in parts) == 4
    for index, group in done.items():
        assert [t.parts["index"] for t in group.trajectories] == [index] * SIZE
        assert [t.reward for t in group.trajectories] == [len(t.completion.text) for t in group.trajectories]
    assert values(rollout_metrics(list(done.values())))["reward/index"] == 1.0
    one.reward.close()


class Together(Scorer):
    """Rewards a completion by the number of completions in its call."""

    name, batched = "together", True

    def outcomes(self, answers: Sequence[Answer]) -> list[Outcome]:
        return [Score(value=float(len(answers))) for _ in answers]


def test_batches_of_held_out_questions_are_of_the_size_of_their_own_task() -> None:
    """None is left over, and no batch has both kinds: each kind has a reward and a time limit of its own."""
    evaluation = {"every": 1, "samples": 2, "task": {"reward_batch": 2}}
    reward = HeldOutReward(Together(), Together())
    one = worker(reward, slots=12, task={"reward_batch": 4}, evaluation=evaluation)
    seen: list[set[bool]] = []
    score = one._score
    one._score = lambda answers: (seen.append({p.held_out for p, _ in answers}), score(answers))[1]  # type: ignore[method-assign]
    held = threading.Event()
    one._rewards.submit(held.wait, 20)  # so that all completions wait
    submit(one, [prompt(0), replace(prompt(3), index=-1), prompt(1), replace(prompt(4), index=-2)])
    while one.engine.unfinished or one.thread.progress().busy == 0:
        one.thread.turn()
    held.set()
    done = finish(one, 4)
    most = {index: max(t.reward for t in group.trajectories) for index, group in done.items()}
    assert max(most[0], most[1]) == 4 and max(most[-1], most[-2]) == 2
    assert [len(kinds) for kinds in seen] == [1] * len(seen) and len(seen) == 5


def test_rewards_that_all_hang_end_the_job_in_one_line(running: Callable[..., RolloutWorker], tmp_path: Path) -> None:
    """With the function in its real process."""
    (tmp_path / "mine.py").write_text("import time\ndef hang(text, item): time.sleep(1000)")
    hangs = make_reward(TaskConfig(reward=f"{tmp_path}/mine.py:hang", reward_timeout=0.1))
    one = running(lambda text, asked: checked(hangs, text, asked))
    submit(one, [prompt(0), prompt(1), prompt(2)])
    with pytest.raises(
        UserError, match=r"0.1 s, like the 5 completions before it: mend the function, or raise task"
    ) as end:
        while True:
            one.collect(10, LAST)
    assert "\n" not in str(end.value)
