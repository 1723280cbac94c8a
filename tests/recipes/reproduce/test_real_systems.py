"""Four systems on a real model: questions, numbers of the rules, gains by hand, and the program from end to end."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bebop.config.adapt import AdaptConfig
from bebop.config.fields import from_dict
from bebop.systems.pad.labels import Rollouts
from recipes.reproduce.real_systems import analysis, firp_arms, words
from recipes.reproduce.real_systems.analysis import choice, gains, of_rounds
from recipes.reproduce.real_systems.parts import BEGINS_FROM, KIND, settings
from recipes.reproduce.real_systems.plan import CPU, PARTS, SMOKE, STUDENT, questions
from recipes.reproduce.real_systems.rounds import PLAIN, Decoded, Round, there
from recipes.reproduce.real_systems.rounds import settings as compared
from tests.benchmarks.test_gpu import ABSENT
from tests.recipes.reproduce.synthetic import check_names, number

ROOT = Path(__file__).parents[3]
ONE = Decoded(seconds=2.0, tokens=60, cycles=30, answers=4, reward=0.5, entropy=0.4, counts={})


def rounds(changes: Callable[[str, int], Decoded]) -> dict[str, list[Round]]:
    """Two rounds of every setting with all arms."""
    return {
        name: [{arm: changes(arm, turn) for arm in setting.arms} for turn in range(2)]
        for name, setting in compared(CPU).items()
    }


def found() -> dict[str, list[Round]]:
    """Distilled networks have a quarter more reward, their random gate as many tokens a pair as the other one."""
    return rounds(lambda arm, turn: replace(ONE, reward=0.5 + 0.25 * arm.startswith("OPD") + turn / 100))


@pytest.mark.slow  # together with the others of this file more than two seconds
def test_every_number_that_a_rule_asks_for_is_computed() -> None:
    numbers = of_rounds(found())
    assert numbers["word, OPD, part - SFT"].value == pytest.approx(0.25)
    assert numbers["word, teacher - SFT"].value == 0 and numbers["words, MTP: length"].value == 2
    assert numbers["blocks, greedy, block: x plain"].value == 1
    others = {"AUC", "share of pivots", "classifier, change", "classifier - random", "share", "training prompts"}
    others |= {"transferred gain", "apparent gain", "layers, spread over loss"}
    for rival in ("FIRP", *firp_arms.RIVALS):
        others |= {f"length {n}, {rival}" for n in (16, 32, 63)}
        others |= {f"length {n}, FIRP - {rival}" for n in (16, 32, 63)}
    check_names("real_systems", {**numbers, **dict.fromkeys(others, number(1.0))})
    lines = analysis.table(found())
    assert {line["arm"] for line in lines} == {arm for one in compared(CPU).values() for arm in one.arms}


@pytest.mark.slow  # as above
def test_what_was_not_measured_leaves_no_number() -> None:
    """Questions without an answer have no reward, and a single round has no interval."""
    numbers = of_rounds(rounds(lambda arm, turn: replace(ONE, reward=float("nan"))))
    assert "words, MTP: reward" not in numbers and "words, MTP: length" in numbers
    assert not of_rounds({name: one[:1] for name, one in found().items()})


@pytest.mark.slow  # as above
def test_gains_are_those_of_the_sizes_that_were_best_in_the_first_table() -> None:
    """The best fixed size has a mean of 2.5 in the first table; sizes chosen there have 3."""
    first = np.array([[3.0, 2.0], [2.0, 3.0], [2.0, 3.0], [3.0, 2.0]])
    found = gains(first, first)
    assert found["apparent gain"].value == found["transferred gain"].value == pytest.approx(3 / 2.5 - 1)
    turned = gains(first, 5 - first)
    assert turned["transferred gain"].value == pytest.approx(2 / 2.5 - 1) and turned["apparent gain"].value > 0


@pytest.mark.slow  # as above
def test_a_choice_is_held_against_a_random_one() -> None:
    """Of eight candidates the two with the lowest scores cost nothing, and the others a chance of a half."""

    def row(i: int) -> Rollouts:
        value = "1111" if i < 2 else "1100"
        return Rollouts(
            prompt=i, prefix=(1,), token=2, p=0.1, q=0.2, entropy=1.0, value=value, reference="1111", residual="1111"
        )

    rows = [row(i) for i in range(8)]
    found = choice(rows, np.arange(8.0), 4)
    assert found["classifier, change"].value == 0 and found["classifier - random"].value == pytest.approx(0.375)
    assert choice(rows, -np.arange(8.0), 4)["classifier - random"].value == pytest.approx(-0.5 + 0.375)


@pytest.mark.slow  # as above
def test_no_question_of_the_test_is_trained_on() -> None:
    for sizes in (CPU, SMOKE):
        train, test = (questions(sizes, which) for which in (False, True))
        assert train.keys() == test.keys() == {"open", "words", "word"}
        for kind in train:
            texts = [{row["question"] for row in rows[kind]} for rows in (train, test)]
            assert texts[0] and texts[1] and len(texts[0]) == len(train[kind]) and not texts[0] & texts[1], kind
            assert len(test[kind]) >= sizes.answers[kind], "a round has different questions"
    assert not {*words.nouns(True)} & {*words.nouns(False)} and len({*words.NOUNS}) == len(words.NOUNS)
    assert len(questions(CPU, False)["open"]) * 3 // 5 >= 500, "the choice of block sizes has enough prompts"


@pytest.mark.slow  # as above
@pytest.mark.parametrize(
    ("text", "answer", "reward"),
    [
        ("The Lamp is by the river.", "river lamp", 1.0),
        ("Two lamps stood there.", "lamp", 1.0),
        ("A clamp.", "lamp", 0.0),
        ("A river.", "river lamp", 0.0),
        ("= 12", "12", 1.0),
    ],
)
def test_a_reward_asks_for_every_word(text: str, answer: str, reward: float) -> None:
    assert words.all_words(text, {"answer": answer}) == reward


@pytest.mark.slow  # as above
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("sizes", [CPU, SMOKE], ids=["real", "smoke"])
def test_settings_of_a_part_are_those_of_an_adaptation(name: str, sizes: object, tmp_path: Path) -> None:
    assert isinstance(sizes, type(CPU)) and set(PARTS) == set(KIND) == set(sizes.options)
    (tmp_path / "questions").mkdir()
    (tmp_path / "questions" / f"{KIND[name][1]}.jsonl").write_text('{"question": "?", "answer": "!"}\n')
    config = from_dict(AdaptConfig, settings(tmp_path, sizes, name))
    assert config.part == KIND[name][0] and config.data.sampling.temperature == KIND[name][2]
    needed = BEGINS_FROM.get(name)
    assert needed is None or str(tmp_path / needed) in str(config.model.parts[KIND[needed][0]])
    assert CPU.options["pipo_sft"]["layers"] == CPU.options["pipo_more"]["layers"] == STUDENT < 30


@pytest.mark.slow  # as above
def test_arms_without_their_parts_are_left_out(tmp_path: Path) -> None:
    setting = compared(CPU)["open, greedy"]
    assert [*there(tmp_path, setting)] == [PLAIN, "MTP", "n-gram", "MTP, tree"]


def carried_out(module: str, tmp_path: Path, *given: str, absent: bool = False) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "BEBOP_REPRODUCE": str(tmp_path / "kept"), "PYTHONPATH": str(ROOT)}
    if absent:
        (tmp_path / "sitecustomize.py").write_text(ABSENT)
        environment["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    return subprocess.run(
        [sys.executable, "-m", module, *given], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.slow  # every part and arm on next to nothing: a minute
def test_the_program_goes_from_end_to_end_and_goes_on(tmp_path: Path) -> None:
    done = carried_out("recipes.reproduce.real_systems", tmp_path, "--quick")
    assert done.returncode == 0, done.stderr[-3000:]
    content = json.loads((tmp_path / "kept" / "real_systems" / "results.json").read_text())
    untested = [one["untested"] for one in content["judgements"][0]["findings"]]
    assert not [why for why in untested if why and "not measured" in why], untested
    kept = {file.stem for file in (tmp_path / "kept" / "real_systems" / "measured").glob("*.json")}
    assert kept == {"firp", "firp_arms", "block", "block_transfer", "block_ablations", "pad", "pipo"}
    again = carried_out("recipes.reproduce.real_systems", tmp_path, "--quick", "--stage", "parts", "rounds")
    assert again.returncode == 0 and "completion" not in again.stderr, "what is there is not made again"


@pytest.mark.slow  # five trainings and all arms in processes of their own: a minute
def test_the_run_on_a_gpu_is_tried_without_what_that_machine_lacks(tmp_path: Path) -> None:
    out = tmp_path / "out"
    given = ("--dry-run", "--seconds", "900", "--out", str(out))
    done = carried_out("recipes.reproduce.real_systems.on_gpu", tmp_path, *given, absent=True)
    assert done.returncode == 0, done.stderr[-3000:]
    files = sorted(path.name for path in out.glob("*.json"))
    assert files[-1] == "findings.json" and len(files) == 7
    decoded = [row for row in json.loads((out / "5_rounds.json").read_text())["rows"] if row["what"] == "decoded"]
    assert {"FIRP, tree", "block", "PAD 0.3", "OPD, part", PLAIN} <= {row["arm"] for row in decoded}
    refused = carried_out("recipes.reproduce.real_systems.on_gpu", tmp_path, "--out", str(out))
    assert refused.returncode == 2 and "no NVIDIA GPU" in refused.stderr
