"""The recipe of guess: rows are what the agent loop makes, labels what the policy says; results follow the rule."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.bench.record import ROOT
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.checkpoint import load_tokenizer
from bebop.rollout.agent_loop import AgentLoop
from bebop.rollout.agent_setup import make_episodes
from bebop.rollout.engine import Request
from bebop.tasks.chat_delta import ChatDelta
from bebop.tasks.environment import seed as environment_seed
from bebop.tasks.environments.guess import demonstrations, item
from bebop.trajectory import Completion, Prompt, SamplingParams, Trajectory
from recipes.guess import rule, sft
from recipes.guess.__main__ import main
from recipes.guess.demonstrations import Row, batches, collate, encode
from recipes.guess.playing import LONGEST, TURN, task
from recipes.guess.stages import Plan
from recipes.stages import STAGE, claim, once
from recipes.tiny.sft import IGNORE
from tests.builders import tiny_policy

SLIPS = 0.4
STORED = ROOT / "benchmarks" / "cpu" / "guess.json"


class Script:
    """In place of an engine: says the turns of a demonstration, whatever it is asked."""

    def __init__(self, turns: Sequence[list[int]], texts: Sequence[str]) -> None:
        self.turns: Iterator[tuple[list[int], str]] = iter(zip(turns, texts, strict=True))
        self.asked: list[tuple[int, ...]] = []

    def submit(self, requests: Sequence[Request]) -> list["Future[Completion]"]:
        (request,), (ids, text) = requests, next(self.turns)
        self.asked.append(request.token_ids)
        answer: Future[Completion] = Future()
        count = len(ids)
        answer.set_result(
            Completion(
                token_ids=np.array(ids), logprobs=np.zeros(count, np.float32), versions=np.zeros(count, int), text=text
            )
        )
        return [answer]


def read_in_the_loop(game: int, seed: int, tokenizer: Any, delta: ChatDelta, eos: int) -> tuple[Prompt, Trajectory]:
    """What the real loop and the real environment make of the turns of a demonstration."""
    texts = [m["content"] for m in demonstrations(game, seed, SLIPS) if m["role"] == "assistant"]
    script = Script([[*tokenizer(text, add_special_tokens=False)["input_ids"], eos] for text in texts], texts)
    configured = task(seed)
    loop = AgentLoop(script, configured, LONGEST, delta, make_episodes(configured))  # type: ignore[arg-type]
    prompt = Prompt(index=game, task="guess", text="", token_ids=(), item=item(game, seed))
    assert environment_seed(seed, game) != environment_seed(seed, game + 1)
    params = SamplingParams(temperature=1.0, max_new_tokens=TURN, stop_token_ids=(eos,))
    played = asyncio.run(loop._play(prompt, params, False))
    assert played.trajectory is not None
    return played.prompt, played.trajectory


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelConfig(path="tiny"))


def test_rows_are_what_the_loop_makes_and_labels_are_what_the_policy_says(tokenizer: Any) -> None:
    eos = tokenizer.eos_token_id
    delta = ChatDelta.checked(tokenizer, [eos])
    lengths = set()
    for game in range(24):
        ids, labels = encode(demonstrations(game, 3, SLIPS), tokenizer, delta, eos)
        prompt, trajectory = read_in_the_loop(game, 3, tokenizer, delta, eos)
        whole = trajectory.completion
        assert ids == [*prompt.token_ids, *whole.token_ids.tolist()] and len(ids) <= LONGEST
        told = [*[False] * len(prompt.token_ids), *whole.written.tolist()]
        assert [label != IGNORE for label in labels] == told and sum(told) == sum(
            len(turn.completion.token_ids) for turn in trajectory.turns
        )
        assert all(label in (IGNORE, token) for label, token in zip(labels, ids, strict=True))
        assert max(len(turn.completion.token_ids) for turn in trajectory.turns) <= TURN
        lengths.add(len(trajectory.turns))
    assert {1, 6} & lengths and len(lengths) >= 3  # of some turns, and of many


def test_the_loss_is_of_what_the_policy_says_from_what_stands_before_it(tokenizer: Any) -> None:
    """By hand, row by row without padding: position t - 1 predicts token t."""
    policy = tiny_policy(len(tokenizer), dtype=torch.float64, sharp=4.0)
    delta = ChatDelta.checked(tokenizer, [tokenizer.eos_token_id])
    rows = [encode(demonstrations(game, 5, SLIPS), tokenizer, delta, tokenizer.eos_token_id) for game in range(6)]
    assert len({len(ids) for ids, _ in rows}) > 1
    found = sft.loss_of(policy, *collate(rows, tokenizer.pad_token_id)).item()
    assert found == pytest.approx(np.mean([loss for row in rows for loss in losses(policy, row)]), rel=1e-5)


def losses(policy: Any, row: Row) -> list[float]:
    """-log p of each labelled token."""
    ids, labels = (torch.tensor([values]) for values in row)
    with torch.no_grad():
        hidden = policy.hidden(ids, torch.arange(ids.shape[1])[None], CausalContext())
        logp = policy.logits(hidden).log_softmax(-1)[0]
    return [-logp[t - 1, ids[0, t]].item() for t in range(1, ids.shape[1]) if labels[0, t] != IGNORE]


def test_no_game_is_shown_twice(tokenizer: Any) -> None:
    made = list(batches(tokenizer, tokenizer.eos_token_id, slips=SLIPS, seed=9, steps=3, batch_size=4))
    delta = ChatDelta.checked(tokenizer, [tokenizer.eos_token_id])
    for step, (ids, labels) in enumerate(made):
        games = range(4 * step, 4 * step + 4)
        wanted = [encode(demonstrations(game, 9, SLIPS), tokenizer, delta, tokenizer.eos_token_id) for game in games]
        assert all(
            torch.equal(a, b) for a, b in zip((ids, labels), collate(wanted, tokenizer.pad_token_id), strict=True)
        )


# ---- the rule

BEFORE, AFTER = [0.4, 0.6, 0.5, 0.5], [0.7, 0.9, 0.8, 0.8]


def job(before: list[float], after: list[float]) -> list[list[float]]:
    """Five steps, eleven that do not count, five more."""
    return [before] * 5 + [[0.0] * 4] * 11 + [after] * 5


def test_the_gain_is_of_the_first_and_last_five_steps() -> None:
    jobs = [job(BEFORE, AFTER), job(BEFORE, [r + 0.02 for r in AFTER]), job(BEFORE, [r - 0.02 for r in AFTER])]
    seeds, prompts = rule.over_seeds(jobs), rule.over_prompts(jobs)
    assert seeds.value == pytest.approx(0.3) and prompts.value == pytest.approx(0.3)
    assert seeds.high - seeds.value == pytest.approx(4.303 * 0.02 / 3**0.5, rel=1e-3)
    # 60 prompts on both sides, of standard deviation .0707 and a little more
    assert prompts.value - prompts.low == pytest.approx(2 * 0.0725 * (2 / 60) ** 0.5, rel=0.12)
    assert rule.judge(jobs, [1e-6] * 3, [5.0] * 3)["confirmed"]


@pytest.mark.parametrize(
    ("after", "ratio", "minutes", "failed"),
    [
        ([0.13] * 3, 1e-6, 5.0, ["gain of 0.15 or more"]),
        ([0.6, 0.2, 0.05], 1e-6, 5.0, ["its interval over seeds above 0"]),
        ([0.2] * 2, 1e-6, 5.0, ["3 seeds, 10 steps or more"]),
        ([0.2] * 3, 2e-4, 5.0, ["ratio errors below 1e-04"]),
        ([0.2] * 3, 1e-6, 6.5, ["each job within 6 minutes"]),
    ],
)
def test_one_thing_that_is_missed_is_enough(
    after: list[float], ratio: float, minutes: float, failed: list[str]
) -> None:
    jobs = [job(BEFORE, [r + gain for r in BEFORE]) for gain in after]
    last = len(jobs) - 1
    found = rule.judge(jobs, [1e-6] * last + [ratio], [1.0] * last + [minutes])
    assert [name for name, met in found.items() if not met] == [*failed, "confirmed"]


def test_few_prompts_that_differ_much_do_not_confirm() -> None:
    jobs = [job([0.0, 0.0, 0.0, 0.9], [0.0, 0.0, 0.9, 0.7])[4:-4]] * 3
    found = rule.judge(jobs, [1e-6] * 3, [1.0] * 3)
    assert not found["confirmed"]


def test_a_finished_stage_is_not_done_again_and_a_stopped_one_is(tmp_path: Path) -> None:
    done = []

    def stage(folder: Path) -> dict[str, Any]:
        assert not folder.exists()
        folder.mkdir()
        (folder / "half").write_text("")
        done.append(folder.name)
        if len(done) == 1:
            raise KeyboardInterrupt
        return {"won": 0.5}

    with pytest.raises(KeyboardInterrupt):
        once(tmp_path / "a", stage)
    for _ in range(2):
        once(tmp_path / "a", stage)
    assert done == ["a", "a"]
    assert json.loads((tmp_path / "a" / STAGE).read_text())["won"] == 0.5


def test_a_folder_of_other_settings_is_refused_and_more_seeds_are_not(tmp_path: Path) -> None:
    claim(Plan(), tmp_path)
    claim(Plan(seeds=5), tmp_path)
    with pytest.raises(UserError, match=r"begun with other settings \(slips\): give another folder"):
        claim(Plan(seeds=5, slips=0.2), tmp_path)


def test_slips_that_are_no_share_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^--slips 1\.5 is not possible: it is from 0 to 1$"):
        main(["--out", str(tmp_path), "--slips", "1.5"])


@pytest.mark.exhaustive("every stage of a study; each has a test of its own")
def test_all_stages_in_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A short course learns nothing, and leaves all that a long one does."""
    short = "--supervised-steps 6 --turns 24 --head-steps 3 --held-out 6 --games 8 --steps 2 --groups 2 --group-size 2"
    given = ["--out", str(tmp_path / "all"), "--seeds", "1", *short.split()]
    main(given)
    told = capsys.readouterr().out
    assert "accept length of the head: before" in told and "- confirmed: no" in told
    content = json.loads((tmp_path / "all" / "guess.json").read_text())
    assert [len(step) for step in content["rewards"][0]] == [2, 2]
    assert content["place"]["commit"] and content["rows"][0]["ratio error"] < 1e-4
    assert content["rows"][0]["turns, first"] >= 1
    model = tmp_path / "all" / "head" / "model" / "model.safetensors"
    written = model.stat().st_mtime_ns
    main(given)
    assert model.stat().st_mtime_ns == written


def test_what_is_stored_was_judged_by_the_rule_as_it_stands() -> None:
    content = json.loads(STORED.read_text())
    rows = content["rows"]
    found = rule.judge(content["rewards"], [row["ratio error"] for row in rows], [row["minutes"] for row in rows])
    assert content["rule"]["findings"] == dict(found)
    assert content["rule"]["hash"] == rule.hash_of_rule()
    less = [[[reward - 0.2 for reward in step] for step in job[-rule.STEPS :]] for job in content["rewards"]]
    worse = [job[: -rule.STEPS] + end for job, end in zip(content["rewards"], less, strict=True)]
    assert rule.judge(worse, [0.0] * len(rows), [1.0] * len(rows)) != dict(found)
