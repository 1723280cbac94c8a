import datetime
import json
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bebop.config.job import ModelConfig, TaskConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_tokenizer, resolve
from bebop.run_dir import state_codec as codec
from bebop.runtime import preflight
from bebop.tasks.files import FileItems
from bebop.tasks.procedural import PRECOMPUTED, ProceduralItems, make_dataset, stream_seed
from bebop.tasks.rewards import MathReward
from bebop.tasks.source import MAX_TRIES, EnvironmentSource, PromptSource, chat_encoder, open_text
from bebop.trajectory import Prompt
from tests.cases import slow_but

GCD = TaskConfig(name="gcd", args={"min_value": 10, "max_value": 60})


def letters(question: str) -> tuple[str, tuple[int, ...]]:
    return f"<{question}>", tuple(map(ord, question))


def source(config: TaskConfig = GCD, most: int = 10_000) -> PromptSource:
    return PromptSource(config, letters, most)


def jsonl(path: Path, rows: list[Any]) -> str:
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    return str(path)


def numbered(path: Path, count: int, **more: Any) -> TaskConfig:
    rows = [{"question": f"What is {n}?", "answer": n} for n in range(count)]
    return TaskConfig(source="file", name="numbers", path=jsonl(path, rows), **more)


def test_a_prompt_depends_on_settings_and_index_alone() -> None:
    walked = source()
    in_order = [walked.prompt(n) for n in range(6)]
    resumed = source()
    assert [resumed.prompt(n) for n in (5, 3, 4)] == [in_order[n] for n in (5, 3, 4)]
    assert [p.index for p in in_order] == list(range(6))
    first = in_order[0]
    assert first.text == f"<{first.item['question']}>" and first.token_ids == tuple(map(ord, first.item["question"]))
    assert first.task == "gcd" and {"question", "answer", "metadata"} <= set(first.item)


def test_neighbouring_seeds_share_no_items_although_the_data_set_alone_would() -> None:
    args = {"min_terms": 8, "max_terms": 11}
    plain = [make_dataset("chain_sum", args, seed=s) for s in (1, 2)]
    assert plain[0][1]["question"] == plain[1][0]["question"]  # why seeds are spread
    streams = [ProceduralItems("chain_sum", args, seed=s) for s in range(4)]
    questions = [s.item(n)["question"] for s in streams for n in range(40)]
    assert len(set(questions)) == len(questions)


def test_streams_lie_apart_and_seed_0_stays_below_the_training_seeds() -> None:
    starts = sorted(stream_seed(s) for s in range(200))
    assert starts[0] == 0 and min(b - a for a, b in pairwise(starts)) > 6 * 10**6
    assert all(0 <= stream_seed(s, b, a) < 2**31 for s in (-1, 3) for b in (0, 9) for a in (0, 127))


@pytest.mark.parametrize("name", slow_but(["word_ladder"], PRECOMPUTED))
def test_precomputed_data_sets_go_on_in_blocks(name: str) -> None:
    items, size = ProceduralItems(name, {}, seed=0), PRECOMPUTED[name]
    beyond = items.item(size + 1)
    assert beyond["question"] not in (items.item(1)["question"], items.item(2)["question"])
    assert ProceduralItems(name, {}, seed=0).item(size + 1) == beyond


def test_composite_mixes_data_sets() -> None:
    parts = [{"name": "gcd", "weight": 1}, {"name": "chain_sum", "config": {"min_terms": 2}}]
    items = ProceduralItems("composite", {"datasets": parts}, seed=0)
    assert {items.item(n)["metadata"]["source_dataset"] for n in range(20)} == {"gcd", "chain_sum"}


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("chainsum", {}, ["chainsum", "chain_sum"]),
        ("gcd", {"min_valeu": 3}, ["task.args.min_valeu", "min_value"]),
        ("gcd", {"seed": 3}, ["task.args.seed", "task.seed"]),
        ("gcd", {"min_value": "ten"}, ["task.args", "ten"]),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, ["task.args", "max_terms"]),
        ("composite", {"datasets": [{"name": "gdc"}]}, ["gdc", "gcd"]),
    ],
)
def test_names_and_arguments_that_cannot_work(name: str, args: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        source(TaskConfig(name=name, args=args))
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_long_prompts_are_replaced_and_the_others_stay() -> None:
    config = TaskConfig(name="chain_sum", args={"min_terms": 2, "max_terms": 12})
    free, bounded = source(config), source(config, most=110)
    pairs = [(free.prompt(n), bounded.prompt(n)) for n in range(60)]
    long = [(a, b) for a, b in pairs if len(a.token_ids) > 110]
    assert 5 < len(long) < 55
    assert all(a == b for a, b in pairs if len(a.token_ids) <= 110)
    assert all(len(b.token_ids) <= 110 and b.item["question"] != a.item["question"] for a, b in long)
    assert len({b.item["question"] for _, b in pairs}) > 55  # not one stand-in for all
    assert bounded.prompt(long[0][0].index) == source(config, most=110).prompt(long[0][0].index)


def test_when_nothing_fits_it_says_so() -> None:
    with pytest.raises(UserError, match=rf"{MAX_TRIES} prompts in a row take \d+ to \d+ tokens, but 5 fit"):
        source(most=5).prompt(0)


def test_parquet_as_verl_writes_it(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    row = {"prompt": [{"role": "user", "content": "2+2?"}], "reward_model": {"style": "rule", "ground_truth": "4"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "v.parquet")
    items = FileItems(str(tmp_path / "v.parquet"), "prompt", "reward_model.ground_truth", seed=0)
    assert items.item(7) == {"question": row["prompt"], "answer": "4", "metadata": row}


def test_parquet_of_types_that_json_has_not_goes_into_a_checkpoint_and_back(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    fine = pyarrow.timestamp("ns", "Europe/Berlin")  # pandas writes nanoseconds, which Python's times have not
    columns = {
        "question": ["q"], "answer": [Decimal("0.00001")], "day": [datetime.date(2024, 2, 29)], "raw": [b"\xff"],
        "at": pyarrow.array([1_700_000_000_123_456_789], fine),
        "spans": pyarrow.array([[{"s": 1001}]], pyarrow.list_(pyarrow.struct([("s", pyarrow.duration("ns"))]))),
    }  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    item = FileItems(str(tmp_path / "t.parquet"), "question", "answer", seed=0).item(0)
    assert item["metadata"]["at"].microsecond == 123456 and item["metadata"]["at"].tzname() == "CET"
    codec.save(item, tmp_path / "state")
    assert codec.load(tmp_path / "state") == item
    assert MathReward()("<answer>1/100000</answer>", Prompt(index=0, task="", text="", token_ids=(), item=item)) == 1
    far = pyarrow.table({**columns, "at": pyarrow.array([5 * 10**15], pyarrow.timestamp("ms"))})  # the year 160,000
    pyarrow.parquet.write_table(far, tmp_path / "t.parquet")
    with pytest.raises(UserError, match=r"column 'at' cannot be read: .*; leave it out"):
        FileItems(str(tmp_path / "t.parquet"), "question", "answer", seed=0)


KEEPING = """
class Here:
    async def reset(self, item, seed): ...
    async def step(self, text): ...
    async def close(self): ...
    @staticmethod
    def item(index, seed, what="set"):
        return {"index": index, "more": [{"set": {"b", ("a", 1)}, "file": open, "own": Here()}[what]]}
"""


@pytest.mark.parametrize("what", ["set", "file", "own"])
def test_items_of_an_environment_that_no_checkpoint_can_hold_are_refused(tmp_path: Path, what: str) -> None:
    (tmp_path / "env.py").write_text(KEEPING)
    config = TaskConfig(source="environment", name=f"{tmp_path}/env.py:Here", args={"what": what})
    if what == "set":
        item = EnvironmentSource(config).prompt(3).item
        codec.save(item, tmp_path / "state")
        assert codec.load(tmp_path / "state") == item == {"index": 3, "more": [{"b", ("a", 1)}]}
        return
    with pytest.raises(UserError, match=r"the item of question 3: more\[0\] is .*, a .*, which no checkpoint can hold"):
        EnvironmentSource(config).prompt(3)


def test_rows_that_no_checkpoint_can_hold_are_refused(tmp_path: Path) -> None:
    deep = json.loads("[" * 99 + '{"a": 1}' + "]" * 99)
    path = jsonl(
        tmp_path / "n.jsonl", [{"question": "q", "answer": "a", "more": more} for more in (1, deep[0], [deep])]
    )
    with pytest.raises(UserError, match=r"line 3 of .*n\.jsonl is nested too deeply: give one of at most 100 levels"):
        FileItems(path, "question", "answer", seed=0)
    FileItems(path, "question", "answer", seed=0, size=2)


GOOD = {"question": "q", "answer": "a"}


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["no rows"]),
        ([GOOD, "{"], ["line 2 of"]),
        ([GOOD, "", "[1]"], ["line 3 of", "[1]"]),
        ([GOOD, {"question": "q"}], ["line 2 of", "task.answer_key='answer'", "it has question"]),
        ([{"prompt": "q", "answer": "a"}], ["line 1 of", "task.prompt_key='question'", "it has prompt, answer"]),
        ([{"question": None, "answer": "a"}], ["line 1 of", "task.prompt_key", "null there"]),
        ([GOOD, {"question": "q", "answer": None}], ["line 2 of", "task.answer_key='answer'", "null there"]),
        ([{"question": " ", "answer": "a"}], ["line 1 of", "a text or a list of messages"]),
        ([{"question": [{"text": "q"}], "answer": "a"}], ["line 1 of", "role and content"]),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, rows: list[Any], words: list[str]) -> None:
    path = jsonl(tmp_path / "bad.jsonl", rows)
    with pytest.raises(UserError) as error:
        source(TaskConfig(source="file", path=path))
    assert all(word in str(error.value) for word in [*words, path]) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["bad.jsonl", "bad.parquet"])
def test_bytes_that_are_neither(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=name):
        source(TaskConfig(source="file", path=str(tmp_path / name)))


class FakeTokenizer:
    """Puts 1 before a text, and appends what ``end`` says."""

    def __init__(self, chat_template: str | None, end: tuple[int, ...] = ()) -> None:
        self.chat_template, self.end = chat_template, end

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        own = [ord(c) for c in text]
        return {"input_ids": [1, *own, *self.end] if add_special_tokens else own}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize and add_generation_prompt
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"


def test_chat_encoder_with_and_without_a_template() -> None:
    messages = [{"role": "user", "content": "2?"}]
    text = "<user>2?<assistant>"
    encode = chat_encoder(FakeTokenizer("a template"))
    assert encode("2?") == encode(messages) == (text, tuple(map(ord, text)))  # no second beginning-of-text token
    assert chat_encoder(FakeTokenizer("a template"), system="Be brief.")("2?")[0] == "<system>Be brief." + text
    for end in ((), (2,), (3, 2)):  # a prompt goes on: what a tokenizer appends, such as eos, would end it
        assert chat_encoder(FakeTokenizer(None, end))("2?") == ("2?\n", (1, *map(ord, "2?\n")))
    assert open_text(FakeTokenizer(None), "\x01ab") == (1, *map(ord, "ab")), "it begins with that token already"


def test_a_template_prints_the_day_on_which_the_run_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tomorrow(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Tomorrow":
            return cls(2099, 1, 2)

    policy = resolve("tiny")
    for file in policy.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    template = "{{ strftime_now('%d %b %Y') }}{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    began = ModelConfig(path=str(tmp_path), device="cpu")
    assert began.date == datetime.date.today().isoformat() and ModelConfig().date == "auto"
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    for date, words in ((began.date, datetime.date.today().strftime("%d %b %Y")), ("2026-11-29", "29 Nov 2026")):
        tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path), device="cpu", date=date))
        assert chat_encoder(tokenizer)("2?")[0] == f"{words}2?"


@pytest.mark.parametrize("template", [None, "", "a template"])
def test_a_model_without_a_template_is_warned_of_once(
    template: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(preflight, "load_tokenizer", lambda _: FakeTokenizer(template))
    found = preflight.prompts(ModelConfig(), TaskConfig(name="gcd", system=None), 10_000)
    assert len({found.prompt(n).token_ids for n in range(3)}) == 3
    words = "model.path='tiny' has no chat template: prompts are the bare questions, each with a newline"
    assert [record.getMessage() for record in caplog.records] == ([] if template else [words])
