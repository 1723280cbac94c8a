"""Heads beside GRPO on a real model, in small: rule, monitor, planted streams, weights, stored runs, and the task."""

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bebop.adaptation.probe import Probe
from bebop.certify.declared import tolerance
from bebop.config.job import TaskConfig
from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.checkpoint import save_policy
from bebop.monitor.probe_set import ProbeReading, Sweep
from bebop.tasks.rewards import checked, make_reward
from bebop.tasks.source import PromptSource
from recipes.reproduce.cli import part_of
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.real.heads import BEST
from recipes.reproduce.real.plan import load
from recipes.reproduce.real.rl import __main__ as study
from recipes.reproduce.real.rl import adapted, analysis, beside, findings, jobs, planted, stored, task
from recipes.reproduce.real.rl.plan import ARMS, FROZEN, ORIGINS, SMOKE, directions
from recipes.reproduce.real.rl.readings import records_of, sweep_of
from recipes.reproduce.verdicts import corrected, judge
from tests.recipes.reproduce.real_builders import PLAN

# A run that ends with a flat curve: whatever is learned does not count as a rise.
FEW_STEPS: dict[str, Any] = {"most_steps": 8, "validate_every": 2, "patience": 2, "rise": 1.0, "drops": 1, "every": 2}


# ---- the rule


def exactly(value: float) -> Number:
    return Number(value=value, low=value, high=value)


def numbers(**changes: Number) -> dict[str, Number]:
    """Runs in which all that the paper claims is so; a name's ``_`` stands for ``, ``."""
    named = {
        "least entropy change, rising": exactly(0.4), "greatest entropy change, falling": exactly(-0.8),
        "ce updates - frozen": over_seeds([-0.3, -0.31]), "kl updates - frozen": over_seeds([-0.3, -0.31]),
        "tv updates - frozen": over_seeds([0.01, 0.011]), "flat curves": exactly(1.0),
        **{f"monitor right, {truth}": exactly(0.9) for truth in ("steady", "entropy-driven", "mismatch-driven")},
    }  # fmt: skip
    for way in findings.WAYS:
        named |= {
            f"least reward change, {way}": exactly(0.2), f"entropy part, {way}": over_seeds([0.1, 0.1]),
            f"direct mismatch, {way}": over_seeds([0.001, 0.0011]),
            f"residual mismatch, {way}": over_seeds([0.001, 0.0011]),
            f"entropy part - mismatch part, {way}": over_seeds([0.1, 0.101]),
            f"end tv, {way}": over_seeds([2.0, 2.01]), f"end tv, ce updates, {way}": over_seeds([1.7, 1.71]),
        }  # fmt: skip
    return named | {name.replace("_", ", "): number for name, number in changes.items()}


def verdicts(**changes: Number) -> list[str]:
    return [verdict for verdict, _ in corrected(judge(findings.RULES, numbers(**changes)))]


def test_what_is_as_the_paper_says_is_confirmed() -> None:
    assert set(verdicts()) == {"confirmed"}


@pytest.mark.parametrize(
    ("changes", "places", "verdict"),
    [
        ({"least entropy change_rising": exactly(0.29)}, [3, 4, 5], "not tested"),
        ({"greatest entropy change_falling": exactly(-0.2)}, [0, 1, 2], "not tested"),
        ({"least reward change_rising": exactly(-0.01)}, [3, 4, 5, 6], "not tested"),
        ({"direct mismatch_falling": over_seeds([0.03, 0.0301])}, [0], "refuted"),
        ({"residual mismatch_rising": over_seeds([0.0, 0.02])}, [4], "undecided"),
        ({"entropy part - mismatch part_falling": over_seeds([-0.1, -0.101])}, [2], "refuted"),
        ({"tv updates - frozen": over_seeds([0.2, 0.201])}, [6], "refuted"),
        ({"ce updates - frozen": over_seeds([0.3, 0.301])}, [7], "refuted"),
        ({"flat curves": exactly(2 / 3)}, [6, 7], "not tested"),
        ({"monitor right_entropy-driven": exactly(0.7)}, [9], "refuted"),
    ],
)
def test_each_part_of_the_rule_counts(changes: dict[str, Number], places: list[int], verdict: str) -> None:
    found = verdicts(**changes)
    assert [place for place, each in enumerate(found) if each == verdict] == places, found


# ---- what the monitor is shown


def probed(overlap: float, entropy: float, texts: int = 12, anchors: int = 20, seed: int = 0) -> Probe:
    """Anchors whose first draft has about this overlap and entropy; text 3 has none."""
    rng = np.random.default_rng(seed)
    row = np.repeat([text for text in range(texts) if text != 3], anchors)

    def near(value: float) -> Any:
        return np.clip(value + 0.05 * rng.standard_normal((len(row), 1)), 0, None)

    names = ("target_only", "draft_entropy", "alpha_p_gt_q", "alpha_q_ge_p", "kl_pq")
    both = {"overlap": near(overlap), "target_entropy": near(entropy)}
    return Probe(
        row=row, place=row * 0, task=np.array([""] * len(row)), accept=1 + both["overlap"][:, 0],
        accept_greedy=np.ones(len(row)), numbers={**both, **{name: near(0.5) for name in names}},
    )  # fmt: skip


def test_records_hold_the_first_draft_of_every_completion_with_an_anchor() -> None:
    found = probed(0.6, 2.0)
    records = records_of(found, range(100, 112), step=4)
    assert records.unit.tolist() == [unit for unit in range(100, 112) if unit != 103] and records.step == 4
    first = found.numbers["overlap"][:20, 0]
    assert records.overlap[0, 0] == pytest.approx(first.sum()) and records.cycles[0] == 20
    assert records.emitted[0] == pytest.approx(20 + first.sum())
    assert records.entropy_sum.sum() / records.entropy_count.sum() == pytest.approx(2.0, abs=0.02)


def test_a_sweep_begins_with_the_run_itself() -> None:
    probes = [probed(overlap, entropy) for overlap, entropy in ((0.5, 2.0), (0.7, 1.0), (0.4, 3.0))]
    sweep = sweep_of(probes)
    assert len(sweep.readings) == 2 and sweep.length[1] > sweep.length[0] > sweep.length[2]
    assert sweep.sums is not None and sweep.sums.shape == (3, 11, 4)
    assert sweep.sums[0, :, 0].sum() / sweep.sums[0, :, 1].sum() == pytest.approx(sweep.length[0])


# ---- planted streams


class Known(planted.Streams):
    """Streams whose probes are made up: overlap falls by .1 a nat, the other head has .2 less at equal entropy."""

    def __init__(self, mismatch: float = 0.2) -> None:
        self.plan = dataclasses.replace(SMOKE, planted_answers=24)
        self.mismatch = mismatch
        count = planted.wanted(self.plan)
        self.answers: Any = {t: [None] * n for t, n in count.items()}
        self.states: Any = dict.fromkeys(count)
        self.fixed: Any = [None] * 12
        self._known: Any = {}
        self.__dict__["_fixed_states"] = None

    def _probe(self, other: bool, rows: Any, states: Any, temperature: float) -> Probe:
        entropy = 2.0 * temperature
        return probed(0.8 - 0.1 * entropy - self.mismatch * other, entropy, len(rows), 8)


def test_the_monitor_names_what_was_planted() -> None:
    rows = planted.confusion(Known(), SMOKE)
    assert [planted.share_right(rows, truth) for truth in ("steady", "entropy-driven", "mismatch-driven")] == [1.0] * 3
    assert [row["case"] for row in rows] == ["nothing", "cooler", "warmer", "another head"]


@pytest.mark.slow
def test_another_head_that_fits_as_well_is_no_mismatch() -> None:
    rows = planted.confusion(Known(mismatch=0.0), SMOKE)
    assert planted.share_right(rows, "mismatch-driven") == 0.0


# ---- heads before RL


@pytest.mark.slow
def test_heads_are_trained_on_completions_to_questions_of_the_runs_and_judged_on_others(tmp_path: Path) -> None:
    model = dataclasses.replace(load(PLAN), mtp=None)
    text = adapted.task_text(SMOKE, tmp_path, model)
    asked = [row["question"] for row in task.questions(SMOKE.questions) for _ in range(SMOKE.answers_each)]
    said = [model.tokenizer.decode(list(answer.prompt)) for answer in text.answers]
    assert len(said) == len(asked) and all(question in prompt for question, prompt in zip(asked, said, strict=True))
    held_out = {prompt for prompt, answer in zip(said, text.answers, strict=True) if answer.split == "validation"}
    assert len(held_out) == SMOKE.held_out
    assert not held_out & {p for p, answer in zip(said, text.answers, strict=True) if answer.split == "train"}
    with pytest.raises(UserError, match="the head ce was not trained yet: run first --stage texts heads"):
        adapted.trained(tmp_path, ORIGINS)
    runs = [dataclasses.replace(run, **FEW_STEPS) for run in adapted.head_runs(SMOKE, dict.fromkeys(ORIGINS, "fitted"))]
    adapted.train(runs, SMOKE, tmp_path, model)
    begun = load_file(tmp_path / "starts" / "fitted.safetensors")
    for name, file in adapted.trained(tmp_path, {**ORIGINS, "other": "passing"}).items():
        if name == "other":
            assert file == "passing"
        else:
            head = load_file(file)
            assert any(not torch.equal(head[part], begun[part]) for part in begun), name
    assert {name: told["flat"] for name, told in adapted.curves(tmp_path).items()} == dict.fromkeys(
        adapted.TRAINED, True
    )


@pytest.mark.slow
def test_a_head_goes_on_from_a_file(tmp_path: Path) -> None:
    model = dataclasses.replace(load(PLAN), mtp=None)
    (run,) = (r for r in adapted.head_runs(SMOKE, dict.fromkeys(ORIGINS, "fitted")) if r.name == "tv")
    first = tmp_path / "first"
    adapted.train([dataclasses.replace(run, **FEW_STEPS)], SMOKE, first, model)
    file = first / "heads" / "tv" / BEST
    more = dataclasses.replace(run, start=str(file), **FEW_STEPS | {"most_steps": 0})
    adapted.train([more], SMOKE, tmp_path / "second", model)
    again, begun = load_file(tmp_path / "second" / "heads" / "tv" / BEST), load_file(file)
    assert all(torch.equal(again[part], begun[part]) for part in begun)
    with pytest.raises(UserError, match=r"gone/best\.safetensors is not there: train the head 'gone' first"):
        adapted.train([dataclasses.replace(run, start=f"gone/{BEST}")], SMOKE, tmp_path / "third", model)


# ---- the runs


def test_the_arms_differ_by_the_bonus_alone_and_keep_what_the_heads_need() -> None:
    ways = {way: jobs.settings(SMOKE, way, 1, Path("q.jsonl")) for way in directions(SMOKE)}
    more = set(ways["rising"]) - set(ways["falling"])
    bonus = {f"algorithm.entropy_coefficient={SMOKE.bonus}", f"algorithm.entropy_target={SMOKE.entropy_target}"}
    assert more == bonus and set(ways["falling"]) < set(ways["rising"])
    assert {"trainer.save_every=1", f"trainer.keep={SMOKE.segment + 1}", "rollout.staleness=0"} <= set(ways["falling"])


def test_weights_of_another_version_are_noticed(tmp_path: Path) -> None:
    model = load(PLAN)
    ids, prompt = np.array([5, 6, 7]), np.array([2, 3])
    whole = torch.tensor([[*prompt, *ids]])
    hidden = model.hidden(whole, torch.arange(5)[None], CausalContext())[0].detach()
    logp = model.logits(hidden[1:4]).log_softmax(-1).gather(1, torch.tensor(ids)[:, None])[:, 0].detach().numpy()
    answer: Any = SimpleNamespace(id=9, ids=ids, prompt_ids=prompt, logprobs=logp, version_first=2, version_last=2)
    exactly = tolerance("float32")
    beside.check(model, answer, hidden, 3, exactly)
    with pytest.raises(UserError, match=r"step 4: answer 9 is of weights \[2\], not of 3"):
        beside.check(model, answer, hidden, 4, exactly)
    coarse: Any = SimpleNamespace(**vars(answer) | {"logprobs": logp + np.array([0.2, 0.0, -0.2])})
    beside.check(model, coarse, hidden, 3, tolerance("bfloat16"))
    with pytest.raises(UserError, match=r"step 3: log p of answer 9 differs by 0\.200 nats"):
        beside.check(model, coarse, hidden, 3, exactly)
    save_policy(dataclasses.replace(model, mtp=None), tmp_path / "policy")
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.mul_(1.1)
    other = model.hidden(whole, torch.arange(5)[None], CausalContext())[0].detach()
    with pytest.raises(UserError, match="step 3: log p of answer 9 differs by"):
        beside.check(model, answer, other, 3, exactly)
    beside.put_weights(model, tmp_path / "policy")
    again = model.hidden(whole, torch.arange(5)[None], CausalContext())[0].detach()
    beside.check(model, answer, again, 3, exactly)


# ---- shares


def test_shares_have_every_run_once() -> None:
    runs = study.all_runs(SMOKE)
    assert len(set(runs)) == len(runs) == 4
    shares = [part_of(runs, (i, 3)) for i in (1, 2, 3)]
    assert sorted(run for share in shares for run in share) == sorted(runs)


def test_a_share_is_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    study.judge(study.Work(plan=SMOKE, origins={}, part=(2, 2)))
    assert "not share 2/2: run --stage judge when all have ended" in capsys.readouterr().out


CURVES = {name: {"ended": "flat", "flat": name != "tv"} for name in ("ce", "tv", "e2e_tv")}
METRICS = ("reward/mean", "policy/entropy", "response/length")


def fixed(overlap: float) -> ProbeReading:
    """Of six texts with one context each."""
    return ProbeReading(overlap=np.full(6, overlap), entropy=np.linspace(1, 3, 6), unit=np.arange(6))


def look(step: int, overlap: float) -> dict[str, Any]:
    records = {"cycles": [4, 4], "overlap": [4 * overlap, 4 * overlap], "entropy_sum": [8.0, 8.0]}
    own = {"accept": [4 + 4 * overlap], "greedy": [4.0], "anchors": [4.0], "records": records}
    return {"step": step, "reward": 0.5, "arms": {arm: {**own, "fixed": fixed(overlap).to_row()} for arm in ARMS}}


def leave(place: Path, overlap: float) -> None:
    """A run of two steps that has ended, as its stages leave it."""
    for folder in ("run", "looks"):
        (place / folder).mkdir(parents=True)
    lines = [json.dumps({"step": step, **dict.fromkeys(METRICS, float(step))}) for step in (1, 2)]
    (place / "run" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    for step, value in ((1, 0.5), (2, overlap)):
        (place / "looks" / f"step-{step:04d}.json").write_text(json.dumps(look(step, value)))
    sweep = Sweep(entropy=(1.0, 2.0), length=(0.4, 0.5), readings=(fixed(0.4),), sums=np.ones((2, 3, 4)))
    (place / "sweep.json").write_text(json.dumps({arm: sweep.to_row() for arm in FROZEN}))
    (place / study.DONE).write_text("{}")


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> study.Work:
    """Runs in ``made``, results in ``results``; falling-0 and the streams of seed 0 have ended."""
    monkeypatch.setattr(study, "PLACE", tmp_path / "made")
    monkeypatch.setattr(study, "HERE", tmp_path / "results")
    monkeypatch.setattr(study, "QUICK", False)
    monkeypatch.setattr(study.adapted, "curves", lambda place: CURVES)
    monkeypatch.setattr(study.adapted, "trained", lambda place, origins: {"ce": "ce", "other": "other"})
    leave(study.place_of("falling", 0), 0.25)
    study.place_of("rising", 0).mkdir()
    study.rows_file(0).write_text(json.dumps([{"case": "nothing", "truth": "steady", "steady": 8}]))
    return study.Work(plan=SMOKE, origins={})


def test_what_has_ended_is_stored_and_read_as_it_was(work: study.Work) -> None:
    study.store(work)
    files = sorted(path.name for path in (work.folder / stored.FOLDER).iterdir())
    assert files == ["falling-0.json.gz", "planted-0.json.gz"]
    (run,) = stored.runs(work.folder, SMOKE, [("falling", 0)])
    assert [analysis.accept(each, "ce") for each in run.looks] == [1.5, 1.25]
    assert analysis.moved(run, "policy/entropy") == 1.0 and run.device
    entropy, mismatch = analysis.parts(run, "ce")
    assert entropy + mismatch == pytest.approx(-0.25)
    assert [row["flat"] for row in analysis.head_rows([run, run])] == [True, False, True]
    planted = stored.get(stored.planted_file(work.folder, 0), SMOKE)
    assert planted["rows"] == [{"case": "nothing", "truth": "steady", "steady": 8}]


def test_the_same_run_is_stored_in_the_same_bytes(work: study.Work) -> None:
    path = stored.run_file(work.folder, "falling", 0)
    study.store(work)
    before = path.read_bytes()
    study.store(work)
    assert path.read_bytes() == before and [p.suffix for p in path.parent.iterdir()] == [".gz", ".gz"]


def test_runs_of_another_plan_or_of_none_are_not_judged(work: study.Work) -> None:
    with pytest.raises(UserError, match=r"falling-0\.json\.gz is not there: run --stage runs planted keep first"):
        study.judge(work)
    study.store(work)
    assert stored.runs(work.folder, replace(SMOKE, seeds=7), [("falling", 0)]), "more seeds are no other plan"
    with pytest.raises(UserError, match=r"falling-0\.json\.gz is of another plan \(lr, steps\)"):
        stored.runs(work.folder, replace(SMOKE, lr=1.0, steps=2), [("falling", 0)])
    assert not (work.folder / "results.json").exists()


def test_only_runs_with_rising_entropy_depend_on_the_bonus(work: study.Work) -> None:
    leave(study.place_of("rising", 1), 0.3)
    study.store(work)
    other = replace(SMOKE, bonus=2.0)
    assert stored.runs(work.folder, other, [("falling", 0)]) and stored.get(stored.planted_file(work.folder, 0), other)
    with pytest.raises(UserError, match=r"rising-1\.json\.gz is of another plan \(bonus\)"):
        stored.runs(work.folder, other, [("rising", 1)])


@pytest.mark.parametrize("skip", [True, False])
def test_what_is_stored_is_made_again_unless_it_is_left_out(
    skip: bool, work: study.Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    study.store(work)
    (study.place_of("falling", 0) / study.DONE).unlink()
    study.rows_file(0).unlink()
    begun: list[str] = []

    def beside(plan: Any, place: Path, *_: Any) -> SimpleNamespace:
        begun.append(place.name)
        return SimpleNamespace(done=plan.steps)

    monkeypatch.setattr(study, "Beside", beside)
    monkeypatch.setattr(study, "first_policy", lambda plan: None)
    monkeypatch.setattr(study.texts, "fixed_texts", lambda *_: [])
    monkeypatch.setattr(study.texts, "planted_texts", lambda *_: [])
    monkeypatch.setattr(study, "with_head", lambda *_: None)
    monkeypatch.setattr(study, "Streams", lambda *_: None)
    monkeypatch.setattr(study, "confusion", lambda *_: [])
    again = replace(work, skip_stored=skip)
    study.carry_out(again)
    study.plant(again)
    assert ("falling-0" in begun) == (not skip) and {"rising-0", "falling-1", "rising-1"} <= set(begun)
    assert [study.rows_file(seed).is_file() for seed in (0, 1)] == [not skip, True]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("A dusty bridge over a calm and narrow river.", 1.0),
        ("The bridge is old, isn't it?", 1.0),
        ('"An old bridge that nobody crosses!"\n', 1.0),
        ("A dusty bridge. It is old.", 0.5),  # two sentences
        ("A dusty bridge\nover a river.", 0.5),  # two lines
        ("A dusty bridge over a calm and narrow", 0.5),  # cut off
        ("A dusty bridge over a calm and narrow river that nobody has ever seen.", 0.5),  # 14 words
        ("A dusty bridge.", 0.5),  # 3 words
        ("A dusty bridgehead over a calm river.", 0.5),  # another word
        ("A cambridge scholar wrote this.", 0.5),
        ("It is old. It is narrow.", 0.0),
        ("", 0.0),
    ],
)
def test_half_for_a_short_sentence_half_for_the_word(text: str, reward: float) -> None:
    assert task.score(text, {"answer": "bridge"}) == reward


def test_questions_are_distinct_and_the_same_for_a_seed() -> None:
    some = task.questions(60)
    assert len({row["question"] for row in some}) == 60 and all(row["answer"] in row["question"] for row in some)
    assert task.questions(100)[:60] == some != task.questions(60, seed=1)
    most = len(task.KINDS) * len(task.THINGS)
    assert len({row["question"] for row in task.questions(most)}) == most
    with pytest.raises(UserError, match=rf"{most + 1} questions are not possible: give 1 to {most}"):
        task.questions(most + 1)


def test_a_job_asks_and_rewards_it(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    task.write_questions(path, 8)
    assert [json.loads(line) for line in path.read_text().splitlines()] == task.questions(8)
    config = TaskConfig(source="file", name="short", path=str(path), reward=f"{task.__file__}:score", system=None)
    prompt = PromptSource(config, lambda question: (question, (1, 2)), 8).prompt(0)
    reward = make_reward(config)
    assert checked(reward, f"An old and quiet {prompt.item['answer']} in the rain.", prompt) == 1.0
    assert checked(reward, "Nothing", prompt) == 0.0
