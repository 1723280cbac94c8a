"""Trajectories of several turns on the real engine: tokens in, tokens out, losses, budgets, and their measures."""

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.config.fields import from_dict
from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.protocols import Assignment, PartialGroup
from bebop.errors import UserError
from bebop.metrics.metrics import values
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.monitor.drift import by_key
from bebop.monitor.estimators import rollout_metrics
from bebop.monitor.records import AFTER, from_groups
from bebop.rollout.agent_loop import AgentLoop
from bebop.rollout.agent_setup import make_episodes
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker
from bebop.tasks.chat_delta import ChatDelta, GivenTokens
from bebop.tasks.environment import find_kind, load_class
from bebop.tasks.source import EnvironmentSource
from bebop.trajectory import OPENING, DecodeStats, Group, Prompt, Trajectory
from bebop.trajectory_db.reader import NAME, Trajectories
from bebop.trajectory_db.writer import TrajectoryLog
from tests.builders import bare_policy, letters
from tests.rollout import echo_environments

SIZE, EOS, LONGEST, ROOM = 2, 11, 48, 400
ECHO = f"{Path(echo_environments.__file__).resolve()}:Echo"
TOKENS = f"{Path(echo_environments.__file__).resolve()}:TokenEcho"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}"


def begin_anew() -> None:
    """Count resets from 1 again."""
    load_class(find_kind(ECHO).make).resets = 0  # type: ignore[attr-defined]


@pytest.fixture
def made() -> Iterator[list[RolloutWorker]]:
    """Workers to be stopped at the end, whatever happens."""
    workers: list[RolloutWorker] = []
    begin_anew()
    yield workers
    for one in workers:
        one.stop()


def policy() -> Policy:
    """In float64, with a template and a token that no text gives; every twelfth token ends a turn, or so."""
    chosen = bare_policy(dtype=torch.float64, sharp=6.0)
    chosen.tokenizer = letters(chosen.vocab_size, pair=5)
    chosen.tokenizer.chat_template = TEMPLATE
    return chosen


def worker(made: list[RolloutWorker], environment: dict[str, Any] | None = None, **args: Any) -> RolloutWorker:
    longest, room = args.pop("longest", LONGEST), args.pop("room", ROOM)
    name, slots = args.pop("name", ECHO), args.pop("slots", 4)
    sections: dict[str, dict[str, Any]] = {
        "task": {"source": "environment", "name": name, "args": args, "environment": environment or {}},
        "rollout": {"sampling": {"max_new_tokens": longest}, "max_length": room, "staleness": 1},
        "trainer": {"group_size": SIZE},
    }
    config = from_dict(JobConfig, sections)
    used = policy()
    engine = TorchEngine(used, DecodingConfig(draft_tokens=2), slots=slots, max_length=room)
    one = RolloutWorker(engine, lambda *_: 0.0, config, eos=(EOS,))
    given = find_kind(name).tokens
    delta = GivenTokens(used.vocab_size) if given else ChatDelta.checked(used.tokenizer, (EOS,))
    one.agents = AgentLoop(one.thread, config.task, room, delta, make_episodes(config.task))
    made.append(one)
    return one


def played(one: RolloutWorker, count: int = 1, asked: Callable[[int], Prompt] | None = None) -> list[PartialGroup]:
    """What becomes of the groups of ``count`` prompts, by default of questions without end."""
    one.start()
    prompt = asked or (lambda i: Prompt(index=i, task="echo", text="", token_ids=(), item={"index": i}))
    prompts = [prompt(i) for i in range(count)]
    one.submit([Assignment(prompt=p, members=tuple(range(SIZE))) for p in prompts])
    parts: list[PartialGroup] = []
    seen = 0
    while sum(len(part.members) for part in parts) < count * SIZE:
        report = one.collect(20, seen)
        seen = report.number
        assert report.parts, "nothing for 20 s"
        parts += report.parts
    return parts


def trajectories(parts: list[PartialGroup]) -> list[tuple[Prompt, Trajectory]]:
    return [(part.prompt, t) for part in parts for t in part.trajectories if t is not None]


def test_what_was_sampled_is_what_is_read_again(made: list[RolloutWorker]) -> None:
    """One forward over all ids of a trajectory gives each written token the log-prob that the engine gave it."""
    found = trajectories(played(worker(made, turns=4), count=3))
    assert len(found) == 3 * SIZE and max(len(t.turns) for _, t in found) == 4
    assert any("ab" in turn.completion.text for _, t in found for turn in t.turns[:-1])
    model, delta = policy(), ChatDelta.checked(policy().tokenizer, (EOS,))
    for prompt, trajectory in found:
        asked = {"role": "user", "content": f"question {prompt.item['index']} of {prompt.item['index']}"}
        assert list(prompt.token_ids) == delta.first([asked])
        for before, turn in zip(trajectory.turns, trajectory.turns[1:], strict=False):
            assert before.completion.token_ids[-1] == EOS  # sampled, not made up
            said = {"role": "tool", "content": f"you wrote {len(before.completion.text)}"}
            assert turn.observation.tolist() == delta.observation([said])
        whole = trajectory.completion
        ids = torch.tensor([[*prompt.token_ids, *whole.token_ids.tolist()]])
        with torch.no_grad():
            hidden = model.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
            logp = model.backbone.lm_head(hidden).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
        written = logp[len(prompt.token_ids) - 1 :].numpy()[whole.written]
        np.testing.assert_allclose(written, whole.logprobs[whole.written], atol=1e-6)
        assert trajectory.reward == sum(t.completion.finish_reason == "stop" for t in trajectory.turns)


def test_an_environment_may_speak_tokens(made: list[RolloutWorker]) -> None:
    found = trajectories(played(worker(made, name=TOKENS), count=3))
    assert len(found) == 3 * SIZE and max(len(t.turns) for _, t in found) == 3
    for prompt, trajectory in found:
        history = list(prompt.token_ids)
        assert history == [3, 4, prompt.index]
        for turn in trajectory.turns:
            history += turn.observation.tolist()
            assert turn.observation.size == 0 or turn.observation.tolist() == [5, (len(history) - 2) % EOS]
            history += turn.completion.token_ids.tolist()
        # What it was given over all steps is what was sampled, but for a turn that was cut off.
        stopped = [t.completion.token_ids for t in trajectory.turns if t.completion.finish_reason == "stop"]
        assert trajectory.counts.get("sum", 0) == sum(ids.sum() for ids in stopped)


def test_a_turn_that_is_cut_off_ends_the_trajectory(made: list[RolloutWorker]) -> None:
    found = trajectories(played(worker(made, turns=50, longest=6), count=6))
    assert {t.ended for _, t in found} == {"length"}
    for _, trajectory in found:
        *others, last = trajectory.turns
        assert last.completion.finish_reason == "length" and EOS not in last.completion.token_ids[:-1]
        assert all(t.completion.token_ids[-1] == EOS for t in others)
        assert trajectory.reward == len(others)  # the environment never saw the last one


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["turns", "tokens", "seconds", "done"])
def test_budgets(ended: str, made: list[RolloutWorker]) -> None:
    limits = {"turns": {"max_turns": 2}, "seconds": {"max_seconds": 1e-9}}.get(ended, {})
    room, longest = (160, 150) if ended == "tokens" else (ROOM, 100)
    one = worker(made, limits, turns=2 if ended == "done" else 50, room=room, longest=longest)
    for prompt, trajectory in trajectories(played(one, count=2)):
        assert trajectory.ended == ended
        tokens = len(prompt.token_ids) + len(trajectory.completion.token_ids)
        assert tokens <= one.agents.max_length if one.agents else False
        due = {"turns": 2, "done": 2, "seconds": 1}.get(ended)
        assert due is None or len(trajectory.turns) == due
        assert trajectory.counts["letters"] == sum(
            len(t.completion.text) for t in trajectory.turns if t.completion.finish_reason == "stop"
        )


def test_a_question_that_is_asked_again_begins_as_before(made: list[RolloutWorker]) -> None:
    one = worker(made, name=ECHO.replace(":Echo", ":Spelled"), turns=1)
    assert one.agents is not None
    source = EnvironmentSource(dataclasses.replace(one.agents.task, size=2))
    begun = {prompt.index: prompt for prompt, _ in trajectories(played(one, 6, source.prompt))}
    tokens = {number: {p.token_ids for p in begun.values() if p.number == number} for number in range(2)}
    assert [p.epoch for _, p in sorted(begun.items())] == [0, 0, 1, 1, 2, 2]
    assert [len(known) for known in tokens.values()] == [1, 1] and tokens[0] != tokens[1]


@pytest.mark.slow
def test_a_lost_environment_begins_again_from_the_first_turn(made: list[RolloutWorker]) -> None:
    undisturbed = trajectories(played(worker(made, turns=3)))
    begin_anew()
    again = trajectories(played(worker(made, turns=3, breaks=[1, 2, 3])))
    assert sorted(t.restarts for _, t in again) == [1, 2]
    ids = [sorted(tuple(t.completion.token_ids.tolist()) for _, t in found) for found in (undisturbed, again)]
    assert ids[0] == ids[1]  # its seed is that of the member, whatever was lost
    assert {t.reward for _, t in again} == {t.reward for _, t in undisturbed}


def test_what_is_lost_too_often_is_no_row_of_reward_0(
    made: list[RolloutWorker], caplog: pytest.LogCaptureFixture
) -> None:
    parts = played(worker(made, {"max_restarts": 1}, turns=3, breaks=[*range(1, 100)]))
    assert [t for part in parts for t in part.trajectories] == [None] * SIZE
    assert all(part.prompt.token_ids == () for part in parts)
    told = [r.getMessage() for r in caplog.records if "was lost" in r.getMessage()]
    assert [line.partition("number ")[2][:2] for line in told] == ["1 ", "2 ", "4 "], "of four losses"
    assert all("of prompt 0" in line and "the environment broke" in line for line in told)


def test_a_question_that_leaves_no_room_is_lost_and_ends_no_job(made: list[RolloutWorker]) -> None:
    parts = played(worker(made, longest=4, room=8))
    assert [t for part in parts for t in part.trajectories] == [None] * SIZE


def test_members_that_begin_differently_are_refused(made: list[RolloutWorker]) -> None:
    with pytest.raises(UserError, match="members of the group of prompt 0 begin differently"):
        played(worker(made, alike=False))


def test_a_reward_that_is_no_number_ends_the_job(made: list[RolloutWorker]) -> None:
    with pytest.raises(UserError, match="reward nan"):
        played(worker(made, reward=float("nan")))


# ---- many at a time

RESTARTS = 1


@pytest.mark.slow
def test_what_is_killed_is_counted_exactly(made: list[RolloutWorker], tmp_path: Path) -> None:
    """Every death is a restart, or one of those after which a member was given up; no reward is made up."""
    prompts = 20
    limits = {"max_restarts": RESTARTS, "processes": 4}
    one = worker(made, limits, name=ECHO.replace(":Echo", ":Fragile"), folder=str(tmp_path))
    parts = played(one, count=prompts)
    assert sorted((part.prompt.index, m) for part in parts for m in part.members) == [
        (index, member) for index in range(prompts) for member in range(SIZE)
    ]
    kept: list[Trajectory] = [t for _, t in trajectories(parts)]
    lost = prompts * SIZE - len(kept)
    deaths = len([*tmp_path.iterdir()])
    assert deaths > 0 and sum(t.restarts for t in kept) + lost * (RESTARTS + 1) == deaths
    for trajectory in kept:
        steps = sum(turn.completion.finish_reason == "stop" for turn in trajectory.turns)
        assert trajectory.reward == steps and (trajectory.ended == "length" or steps == 3)


@pytest.mark.slow
def test_many_are_open_on_few_slots(made: list[RolloutWorker]) -> None:
    """256 trajectories wait for their environments at a time, on 32 slots."""
    name, wanted = ECHO.replace(":Echo", ":Gate"), 256
    one = worker(made, name=name, wanted=wanted, slots=32, longest=200)
    found = trajectories(played(one, count=wanted // SIZE))
    assert len(found) == wanted and load_class(find_kind(name).make).most == wanted  # type: ignore[attr-defined]
    assert {(t.ended, t.reward) for _, t in found} <= {("done", 1.0), ("length", 0.0)}  # some never stop by themselves
    assert sum(t.reward for _, t in found) > wanted / 2


def test_turns_of_the_engine_are_measured_and_stored(made: list[RolloutWorker], tmp_path: Path) -> None:
    found = trajectories(played(worker(made, turns=4), count=3))
    groups = [
        Group(prompt=prompt, trajectories=tuple(t for p, t in found if p.index == prompt.index))
        for _, prompt in sorted({p.index: p for p, _ in found}.items())
    ]
    got = values(rollout_metrics(groups, version=0))
    members = [t for _, t in found]
    assert got["turn/count"] == pytest.approx(np.mean([len(t.turns) for t in members]))
    later = [turn.completion for t in members for turn in t.turns[1:]]
    first = sum((dict(c.stretches)[OPENING] for c in later), DecodeStats())
    assert first.cycles == len(later) > 6
    assert got["turn/overlap/after/1"] == pytest.approx(first.overlap[0] / first.reached[0])
    assert 0 < got["turn/overlap/after/1"] < 1
    whole = sum((turn.completion.stats for t in members for turn in t.turns), DecodeStats())
    kinds = by_key("turn", from_groups(groups, step=1))
    assert list(kinds) == ["0", "1", "2-3", AFTER]
    assert sum(float(kinds[name].cycles.sum()) for name in ("0", "1", "2-3")) == whole.cycles
    log = TrajectoryLog(tmp_path / NAME, "all", str, 2)
    log.write(1, groups, 0, "bebop", {})
    log.close()
    with Trajectories(tmp_path / NAME) as stored:
        for answer, trajectory in zip(
            stored.answers(range(1, 2)), (t for g in groups for t in g.trajectories), strict=True
        ):
            assert answer.ids.tolist() == trajectory.completion.token_ids.tolist()
            assert (answer.marks >= 0).tolist() == trajectory.completion.written.tolist()
            assert answer.written == trajectory.written
