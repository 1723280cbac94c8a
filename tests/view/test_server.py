"""What the viewer's server answers: lists, answers, curves, alarms; whom it turns away, and that nothing is written."""

import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.trajectory import NONE, VERDICTS
from bebop.trajectory_db.reader import NAME
from bebop.view.folders import WORDS
from tests.commands import on_disk
from tests.view.made_up import GROUP, HOSTILE, write_run
from tests.view.serving import ask

RUN = "/api/runs/0"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("view") / "first", answers=200, length=20)


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict]:
    """All answers as they are stored."""
    with closing(sqlite3.connect(run / NAME)) as store:
        store.row_factory = sqlite3.Row
        return [dict(row) for row in store.execute("SELECT * FROM answers JOIN prompts USING (prompt)")]


def got(run: Path, address: str) -> dict:
    [(status, body)] = ask([run], address)
    assert status == 200, body
    return body


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("sort", ["step", "reward", "length", "accept_length", "overlap", "system", "traced"])
def test_lists_are_sorted_and_what_is_missing_comes_last(run: Path, rows: list[dict], sort: str, order: str) -> None:
    found = got(run, f"{RUN}/answers?sort={sort}&order={order}&limit=500")["rows"]
    values = [row[sort] for row in found if row[sort] is not None]
    assert values == sorted((r[sort] for r in rows if r[sort] is not None), reverse=order == "desc")
    assert all(row[sort] is None for row in found[len(values) :]) and len(found) == len(rows)


def test_a_list_begins_with_traced_answers_the_newest_first(run: Path, rows: list[dict]) -> None:
    found = got(run, f"{RUN}/answers?limit=500")["rows"]
    keys = [(row["traced"], row["step"], row["id"]) for row in found]
    assert keys == sorted(((r["traced"], r["step"], r["id"]) for r in rows), reverse=True)
    assert {0, 1} == {row["traced"] for row in found}
    in_order = got(run, f"{RUN}/answers?order=asc&limit=1")["rows"][0]
    assert (in_order["traced"], in_order["step"]) == (0, 1)


def test_the_right_answer_is_told_with_an_answer_and_with_those_to_its_prompt(run: Path) -> None:
    assert got(run, f"{RUN}/answers/5")["gold"] == "3"  # of prompt 1, see ``add_answers``
    assert got(run, f"{RUN}/answers/5/siblings")["gold"] == "3"


def test_pages_of_a_list_put_together_are_the_list(run: Path) -> None:
    whole = got(run, f"{RUN}/answers?sort=reward&limit=500")
    pages = [got(run, f"{RUN}/answers?sort=reward&limit=70&offset={offset}") for offset in (0, 70, 140)]
    assert [row["id"] for page in pages for row in page["rows"]] == [row["id"] for row in whole["rows"]]
    assert {page["total"] for page in pages} == {200}


def test_filters_and_ranges_hold_together(run: Path, rows: list[dict]) -> None:
    asked = "min_reward=0.5&max_reward=0.5&min_step=3&finish=stop&system=target_only&limit=500"
    found = got(run, f"{RUN}/answers?{asked}")
    wanted = {
        r["id"] for r in rows
        if r["reward"] == 0.5 and r["step"] >= 3 and r["finish"] == "stop" and r["system"] == "target_only"
    }  # fmt: skip
    assert wanted and {row["id"] for row in found["rows"]} == wanted and found["total"] == len(wanted)


@pytest.mark.parametrize("text", ["(17)", "GCD?", "100%", "_", "\\", "' OR 1=1 --", "<img src=x", "漢"])
def test_a_search_finds_its_very_text_in_prompts_and_answers(run: Path, rows: list[dict], text: str) -> None:
    wanted = {r["id"] for r in rows if text.lower() in (r["text"] + "\0" + _prompt(run, r["prompt"])).lower()}
    [(status, found)] = ask([run], f"{RUN}/answers", params={"q": text, "limit": "500"})
    assert status == 200 and {row["id"] for row in found["rows"]} == wanted


def _prompt(run: Path, number: int) -> str:
    return f"<|user|>What is the gcd? ({number})<|assistant|>"


def test_an_anchor_is_where_its_row_stands(run: Path) -> None:
    found = got(run, f"{RUN}/answers?sort=length&limit=500&anchor=77")
    assert found["rows"][found["place"]]["id"] == 77
    assert got(run, f"{RUN}/answers?q=nowhere&anchor=77")["place"] is None


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("sort=text", "sort=text"), ("sort=id;drop", "drop"), ("order=up", "order=up"), ("limit=-1", "limit=-1"),
        ("limit=100000", "limit=100000"), ("offset=x", "offset=x"), ("min_reward=nan", "min_reward=nan"),
        ("max_step=", "max_step="), ("min_text=1", "min_text=1"), ("speed=1", "speed=1"), ("q=a&q=b", "twice"),
    ],
)  # fmt: skip
def test_a_query_that_is_not_possible_is_named(run: Path, query: str, named: str) -> None:
    [(status, body)] = ask([run], f"{RUN}/answers?{query}")
    assert status == 400 and named in body["error"] and "\n" not in body["error"]


def test_facets_are_what_the_list_can_be_filtered_by(run: Path, rows: list[dict]) -> None:
    found = got(run, f"{RUN}/facets")
    for name in WORDS:
        assert found["words"][name] == {v: sum(r[name] == v for r in rows) for v in sorted({r[name] for r in rows})}
    assert found["ranges"]["step"] == [1, 13] and found["ranges"]["reward"] == [0.0, 1.0]


def test_answers_are_found_by_epoch_and_question(run: Path, tmp_path: Path) -> None:
    again = write_run(tmp_path / "again", answers=40, questions=4)  # ten prompts of four answers
    ranges = got(again, f"{RUN}/facets")["ranges"]
    assert ranges["epoch"] == [0, 2] and ranges["question"] == [0, 3]
    found = got(again, f"{RUN}/answers?min_question=1&max_question=1&sort=epoch&order=asc")
    assert [(row["prompt"], row["epoch"]) for row in found["rows"]] == [
        (p, p // 4) for p in (1, 5, 9) for _ in range(4)
    ]
    assert got(again, f"{RUN}/answers?min_epoch=2")["total"] == 8
    assert got(again, f"{RUN}/answers/36")["answer"]["question"] == 1
    assert got(run, f"{RUN}/facets")["ranges"]["question"] == [None, None]
    assert got(run, f"{RUN}/answers/5")["answer"]["question"] is None
    parts = [got(run, f"{RUN}/answers/{number}")["answer"]["parts"] for number in (5, 28)]
    assert parts == [{}, {"right": 0.5, "code": None}]


def test_an_answer_has_every_number_that_is_stored(run: Path) -> None:
    found = got(run, f"{RUN}/answers/5")
    with closing(sqlite3.connect(run / NAME)) as store:
        store.row_factory = sqlite3.Row
        stored = store.execute("SELECT * FROM tokens WHERE answer = 5").fetchone()
    tokens = found["tokens"]
    for name, kind in {"ids": "<i4", "versions": "<i4", "cycles": "<i4", "verdicts": "i1"}.items():
        assert tokens[name] == np.frombuffer(stored[name], kind).tolist()
    for name in ("logprobs", "trainer_logprobs", "overlap", "draft_probs", "target_entropy"):
        shown = np.array([np.nan if v is None else v for v in tokens[name]])
        np.testing.assert_allclose(shown, np.frombuffer(stored[name], "<f4"), atol=1e-4)
    tops = np.frombuffer(stored["target_top"], "<f2").reshape(len(tokens["ids"]), -1)
    np.testing.assert_allclose(np.array(tokens["target_top"]), tops, atol=1e-5)
    drafts = np.frombuffer(stored["drafts"], "<i4").tolist()
    assert tokens["drafts"] == [None if draft == NONE else draft for draft in drafts] and None in tokens["drafts"]
    assert "".join(found["pieces"][str(i)] for i in tokens["ids"]) == found["turns"][1]["text"]
    assert found["turns"][0] == {"role": "prompt", "text": _prompt(run, 5 // GROUP)}
    assert found["verdicts"] == list(VERDICTS) and found["drafters"] == ["mtp"]


def test_an_answer_that_was_not_traced_has_its_text_and_log_probs(run: Path) -> None:
    found = got(run, f"{RUN}/answers/{GROUP - 1}")
    assert found["tokens"]["verdicts"] is None and found["tokens"]["target_top"] is None
    assert len(found["tokens"]["logprobs"]) == found["answer"]["length"] and found["drafters"] == []


def test_a_blob_that_does_not_fit_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "torn", answers=4)
    with closing(sqlite3.connect(run / NAME)) as store, store:
        store.execute("UPDATE tokens SET overlap = substr(overlap, 5) WHERE answer = 0")
        store.execute("UPDATE tokens SET target_top = substr(target_top, 4) WHERE answer = 1")
    answers = ask([run], f"{RUN}/answers/0", f"{RUN}/answers/1", f"{RUN}/answers/2")
    assert [status for status, _ in answers] == [400, 400, 200]
    assert all(NAME in body["error"] and "\n" not in body["error"] for _, body in answers[:2])


def test_answers_to_one_prompt_come_from_every_run(run: Path, tmp_path: Path) -> None:
    same = write_run(tmp_path / "same", answers=40, seed=1)
    other = write_run(tmp_path / "other", answers=40, prompts="Another question")
    [(_, found)] = ask([run, same, other], f"{RUN}/answers/6/siblings")
    assert {(row["run"], row["id"]) for row in found["answers"]} == {(r, i) for r in range(3) for i in range(4, 8)}
    assert {row["run"] for row in found["answers"] if row["same_text"]} == {0, 1}


def test_curves_and_alarms_are_those_of_the_logs(run: Path) -> None:
    curves = got(run, f"{RUN}/curves")
    assert curves["steps"] == list(range(1, 14)) and curves["columns"]["policy/entropy"][1] is None
    [alarm] = got(run, f"{RUN}/alarms")["alarms"]
    assert (alarm["step"], alarm["state"], alarm["action"]["kind"]) == (13, "mismatch-driven", "cotrain_start")


def test_strangers_are_turned_away_and_nothing_may_be_loaded_from_elsewhere(run: Path) -> None:
    for host in ("evil.example:8710", "127.0.0.1.evil.example", "[::1]:80", ""):
        [(status, _)] = ask([run], "/api/runs", headers={"Host": host})
        assert status == 403, host
    assert [s for s, _ in ask([run], "/api/runs", headers={"Host": "localhost:9"})] == [200]
    page = ask([run], "/")[0][1]
    assert "http://" not in page and "https://" not in page and "<script>" not in page


@pytest.mark.parametrize(
    "path",
    ["/page/../server.py", "/page/%2e%2e/server.py", "/page/nothing.js", "/etc/passwd", "/api/runs/9/answers",
     "/api/runs/0/answers/999999", "/api/runs/0/answers/-1", "/api/runs/0/answers/5;"],
)  # fmt: skip
def test_what_is_not_there_is_not_found(run: Path, path: str) -> None:
    [(status, body)] = ask([run], path)
    assert status == 404 and "error" in body


def test_looking_writes_nothing(run: Path) -> None:
    before = on_disk(run)
    ask([run], "/api/runs", "/api/state", f"{RUN}/answers", f"{RUN}/answers/1", f"{RUN}/alarms/13", f"{RUN}/curves")
    assert on_disk(run) == before


def test_names_and_texts_go_out_as_they_are(tmp_path: Path) -> None:
    run = write_run(tmp_path / "<b>name", answers=4, prompts=HOSTILE)
    (_, runs), (_, found) = ask([run], "/api/runs", f"{RUN}/answers/0")
    assert runs["runs"][0]["name"] == "<b>name" and HOSTILE in found["turns"][0]["text"]


def test_a_state_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", answers=4)
    (run / NAME).write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(UserError, match="damaged"):
        ask([run], "/api/state")
