"""The ledger of a real job is in order, and each of its checks sees what it is there for, and nothing else does."""

import json
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.run_dir import state_codec as codec
from bebop.run_dir.checkpoints import MANIFEST, seal
from bebop.trajectory_db.reader import NAME
from tests.chaos.ledger import ALONE, Books, Finding, bits, check, logprobs, rewards
from tests.chaos.plan import reference
from tests.chaos.runner import Run
from tests.chaos.table import rows, staleness_of, summary

pytestmark = pytest.mark.slow
STEPS = 6


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that nothing befell."""
    folder = tmp_path_factory.mktemp("chaos") / "job"
    Run(folder, reference("pull", STEPS)).run()
    return folder


def books(folder: Path) -> Books:
    return Books(folder, staleness_of("pull"))


def journal(change: Callable[[list[dict[str, Any]]], None]) -> Callable[[Path], None]:
    """Change what the trainer's process wrote down."""

    def do(folder: Path) -> None:
        path = folder / "control" / "journal.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        change(lines)
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return do


def database(sql: str) -> Callable[[Path], None]:
    """Change what the job stored."""

    def do(folder: Path) -> None:
        with sqlite3.connect(folder / "job" / NAME) as file:
            file.execute(sql)

    return do


def column(name: str, kind: str, change: Callable[[Any], Any], every: bool = True) -> Callable[[Path], None]:
    """Change an array of the tokens of answers."""

    def do(folder: Path) -> None:
        with sqlite3.connect(folder / "job" / NAME) as file:
            for answer, blob in file.execute(f"SELECT answer, {name} FROM tokens").fetchall()[: None if every else 1]:
                changed = change(np.frombuffer(blob, dtype=kind)).astype(kind).tobytes()
                file.execute(f"UPDATE tokens SET {name} = ? WHERE answer = ?", (changed, answer))

    return do


def another_policy(folder: Path) -> None:
    """Tokens of a single version are of another policy than they say, as where weights did not arrive."""
    with sqlite3.connect(folder / "job" / NAME) as file:
        for answer, versions, logprobs in file.execute("SELECT answer, versions, logprobs FROM tokens").fetchall():
            changed = np.frombuffer(logprobs, "<f4") - 0.01 * (np.frombuffer(versions, "<i4") == STEPS - 3)
            file.execute("UPDATE tokens SET logprobs = ? WHERE answer = ?", (changed.astype("<f4").tobytes(), answer))


def metrics(change: Callable[[list[str]], list[str]]) -> Callable[[Path], None]:
    """Change the log."""

    def do(folder: Path) -> None:
        path = folder / "job" / "metrics.jsonl"
        path.write_text("".join(change(path.read_text().splitlines(keepends=True))))

    return do


def left(what: str) -> Callable[[Path], None]:
    """Leave something behind."""

    def do(folder: Path) -> None:
        path = folder / "left.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), what: ["something"]}))

    return do


def fault(kind: str) -> Callable[[Path], None]:
    """As if something had been done to the job that left no trace."""
    return lambda folder: (folder / "faults.json").write_text(json.dumps([{"kind": kind}])) and None


def swap(lines: list[dict[str, Any]]) -> None:
    """Two batches in the wrong order."""
    lines[2]["trained"], lines[3]["trained"] = lines[3]["trained"], lines[2]["trained"]


def lose_a_member(lines: list[dict[str, Any]]) -> None:
    del lines[2]["trained"][0][1][3]


def learn_again(lines: list[dict[str, Any]]) -> None:
    lines.insert(3, dict(lines[2]))


def another_answer(lines: list[dict[str, Any]]) -> None:
    lines[2]["trained"][0][1][3] = "0" * 16


PLANTED: dict[str, tuple[Callable[[Path], None], set[str]]] = {
    "a batch out of order": (journal(swap), {"order", "stored"}),
    "a batch learned again": (journal(learn_again), {"order"}),
    "a member that was never trained on": (journal(lose_a_member), {"order", "stored"}),
    "another answer than was trained on": (journal(another_answer), {"stored"}),
    "an answer lost": (database("DELETE FROM answers WHERE id = 21"), {"stored"}),
    "an answer of another step": (database("UPDATE answers SET step = 3 WHERE id = 17"), {"stored"}),
    "other tokens than were trained on": (column("ids", "<i4", lambda i: i[::-1], every=False), {"stored"}),
    "a step lost": (metrics(lambda lines: lines[:2] + lines[3:]), {"steps"}),
    "a step twice": (metrics(lambda lines: [*lines[:3], *lines[2:]]), {"steps"}),
    "tokens of weights to come": (column("versions", "<i4", lambda v: v + 9), {"staleness"}),
    "tokens that are too old": (column("versions", "<i4", lambda v: v - 3), {"staleness"}),
    "tokens that go back": (column("versions", "<i4", lambda v: np.append(v[:-1] + 1, 0), every=False), {"staleness"}),
    "another log-prob": (column("logprobs", "<f4", lambda p: p - 0.01), {"log-probs"}),
    "a version of other weights than it says": (another_policy, {"log-probs"}),
    "changed weights that nobody refused": (fault("weights changed"), {"refused"}),
    "a changed checkpoint that nobody noticed": (fault("checkpoint changed"), {"noticed"}),
    "a process that stays": (left("processes"), {"nothing left"}),
    "a folder that stays": (left("folders"), {"nothing left"}),
    "a job that stood still": (lambda f: (f / "done.json").write_text('{"stuck": "nothing"}') and None, {"went on"}),
}  # fmt: skip


def test_books_of_an_undisturbed_job_are_in_order(undisturbed: Path) -> None:
    assert check(books(undisturbed), books(undisturbed), exact=True) == []


@pytest.mark.parametrize("name", PLANTED)
def test_each_check_sees_what_it_is_there_for(name: str, undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(undisturbed, folder, ignore=shutil.ignore_patterns("optimizer*"))
    plant, seen_by = PLANTED[name]
    plant(folder)
    found = {check: look(books(folder)) for check, look in ALONE.items() if check != "log-probs" or check in seen_by}
    assert {check for check, findings in found.items() if findings} == seen_by, found


def test_log_probs_of_versions_that_were_not_kept_are_not_taken_for_right(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(undisturbed, folder)
    for path in (folder / "job" / "checkpoints").glob("step_*"):
        shutil.rmtree(path)
    assert "tokens have no checkpoint of their version" in logprobs(books(folder))[0]


def test_lower_rewards_and_a_changed_bit_show_beside_an_undisturbed_job(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "job"
    shutil.copytree(undisturbed, folder)
    assert rewards(books(folder), books(undisturbed)) == [] == bits(books(folder), books(undisturbed))
    database("UPDATE answers SET reward = 0")(folder)
    assert "rewards differ" in rewards(books(folder), books(undisturbed))[0]
    step = folder / "job" / "checkpoints" / f"step_{STEPS - 1:06d}"
    state = codec.load(step / "trainer")
    state["weights"]["backbone.model.norm.weight"].view(torch.int32)[0] ^= 1
    codec.save(state, step / "trainer")
    (step / MANIFEST).unlink()
    seal(step)
    assert bits(books(folder), books(undisturbed)) == [f"step {STEPS - 1} is not that of the undisturbed job"]


def test_a_fault_is_survived_where_the_job_went_on_and_its_books_are_in_order() -> None:
    fault = {"kind": "worker killed", "alone": True, "noticed": 1.0, "recovered": 3.0}
    sound = {"name": "a", "job": "hangs", "commit": "a", "faults": [fault], "findings": []}
    sound |= {"answers": 16, "steps": 1, "steps again": 0, "prompts again": 0}
    broken = {**sound, "findings": [Finding("order", "a prompt is missing")]}
    stuck = {**sound, "faults": [{"kind": "worker killed", "alone": True}]}
    assert [row["survived"] for row in rows([sound, sound])] == [2, 2]
    assert [row["survived"] for row in rows([broken, stuck, sound])] == [1, 1]
    about = summary([sound, broken])
    assert about["findings about answers lost, doubled or out of order"] == 1 == about["jobs with findings"]
    assert about["noticed within, s"] == 1.0 and about["hangs at default settings, alone"] == 2
