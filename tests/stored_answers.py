"""Answers with hand-made traces, and a ``trajectories.sqlite`` that holds them."""

import dataclasses
from pathlib import Path

import numpy as np

from bebop.trajectory import NONE, TOP, Completion, DecodeStats, Group, Prompt, Trace, Trajectory
from bebop.trajectory_db.reader import NAME, StoredAnswer, Trajectories
from bebop.trajectory_db.writer import TrajectoryLog

SIZE, TOKENS = 2, 5


def trace(count: int, seed: int = 0, most: int = TOP) -> Trace:
    """Any numbers, of every type that a trace has."""
    random = np.random.default_rng(seed)
    whole, real = random.integers(0, 90, (count, most)), random.random((count, most))
    return Trace(
        verdicts=random.integers(0, 5, count).astype(np.int8),
        cycles=np.arange(count, dtype=np.int32) // 2,
        drafters=random.integers(-1, 2, count).astype(np.int8),
        names=("mtp", "suffix"),
        drafts=np.where(real[:, 0] < 0.3, NONE, whole[:, 0]).astype(np.int32),
        **{name: random.random(count).astype(np.float32) for name in ("draft_target_probs", "draft_probs", "overlap")},
        target_entropy=np.full(count, np.nan, dtype=np.float32),
        draft_entropy=random.random(count).astype(np.float32),
        target_ids=whole.astype(np.int32),
        target_top=real.astype(np.float16),
        draft_ids=(whole + 1).astype(np.int32),
        draft_top=real.astype(np.float16)[:, ::-1],
    )


def group(index: int, traced: bool = True, tokens: int = TOKENS, version: int = 0) -> Group:
    """Answers of different lengths, members and rewards; the second is never traced."""

    def one(member: int) -> Trajectory:
        count = tokens + member
        stats = DecodeStats(cycles=2, tokens=count, reached=np.array([2.0, 2.0]), accepted=np.array([2.0, 1.0]))
        stats.overlap, stats.target_entropy = np.array([1.0, 0.5]), np.array([3.0, 1.0])
        completion = Completion(
            token_ids=np.arange(count) + 10 * index,
            logprobs=-np.arange(count, dtype=np.float32) / 8,
            versions=np.minimum(np.arange(count), version),
            text=f"answer {index}.{member} <b>\0 ü \U0001f600",
            finish_reason="length",
            stats=stats,
            exact=member == 0,
            trace=trace(count, seed=index) if traced and member == 0 else None,
        )
        parts = {"short": member / 4, "code": None} if index % 2 else {}
        return Trajectory.single(completion=completion, reward=index + member / 2, timed_out=member == 1, parts=parts)

    prompt = Prompt(index=index, task="gcd", text=f"question {index}", token_ids=(1, 2, index), item={})
    return Group(prompt=prompt, trajectories=tuple(one(member) for member in range(SIZE)))


def opened(folder: Path, resume_from: int | None = None) -> TrajectoryLog:
    return TrajectoryLog(folder / NAME, "all", str, SIZE, resume_from)


def write(log: TrajectoryLog, step: int, groups: int = 2, first: int | None = None) -> list[Group]:
    """Step ``step`` with prompts of its own; the first answer has the trainer's log-probs."""
    start = (step - 1) * groups if first is None else first
    batch = [group(start + i, version=step - 1) for i in range(groups)]
    log.write(step, batch, step - 1, "bebop", {0: np.full(TOKENS, -0.25 * step, dtype=np.float32)})
    return batch


def written(folder: Path, *numbers: int, resume_from: int | None = None) -> list[list[Group]]:
    """Write these steps and close the file."""
    log = opened(folder, resume_from)
    batches = [write(log, step) for step in numbers]
    log.close()
    return batches


def steps(folder: Path) -> list[int]:
    with Trajectories(folder / NAME) as stored:
        return [row["step"] for row in stored.query("SELECT DISTINCT step FROM answers ORDER BY step")]


def same(stored: StoredAnswer, group: Group, member: int) -> None:
    completion = group.trajectories[member].completion
    assert stored.ids.tolist() == completion.token_ids.tolist() and stored.prompt_ids.tolist() == [1, 2, stored.prompt]
    assert stored.logprobs.tolist() == completion.logprobs.tolist() and stored.logprobs.dtype == np.float32
    assert stored.versions.tolist() == completion.versions.tolist()
    assert stored.parts == group.trajectories[member].parts
    assert stored.text == completion.text and stored.prompt_text == group.prompt.text
    assert (stored.trace is None) == (completion.trace is None)
    if stored.trace is not None and completion.trace is not None:
        assert stored.trace.names == completion.trace.names
        for name in (field.name for field in dataclasses.fields(Trace) if field.name != "names"):
            ours, wanted = getattr(stored.trace, name), getattr(completion.trace, name)
            assert ours.dtype == wanted.dtype and ours.shape == wanted.shape, name
            assert np.array_equal(ours, wanted, equal_nan=ours.dtype.kind == "f"), name
