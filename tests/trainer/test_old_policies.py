"""Each token held against the weights that produced it, at every step of a run whose answers straddle updates."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.metrics.metrics import values
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trainer.old_policies import evenly_spaced
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Completion, Group, Prompt, SamplingParams, Trajectory
from tests.cases import slow_but
from tests.trainer.builders import TEMPERATURE, batch, job, policy

PROMPTS, SIZE = ((1, 2, 3), (4, 5), (6, 7, 8, 9)), 2
Load = Callable[[TorchEngine, Mapping[str, Tensor], int], None]


def load(engine: TorchEngine, weights: Mapping[str, Tensor], version: int) -> None:
    engine.load_weights(weights, version)


class Run:
    """Asynchronous training by hand: while the trainer learns from a batch, the engine writes the next one."""

    def __init__(self, on_update: str, load: Load = load, **monitor: Any) -> None:
        self.load = load
        rollout = {"staleness": 1, "on_update": on_update}
        settings = job(monitor=monitor, rollout=rollout, trainer={"group_size": SIZE, "groups_per_step": 3})
        self.trainer = PolicyTrainer(policy(), settings)
        system = DecodingConfig(system="bebop", draft_tokens=2)
        self.engine = TorchEngine(policy(), system, slots=16, max_length=48, on_update=on_update)
        self.asked, self.done = 0, {}
        self.ask()

    def ask(self) -> None:
        """A batch's requests; they run beside what is left of the batch before."""
        for prompt in PROMPTS:
            for _ in range(SIZE):
                sampling = SamplingParams(temperature=TEMPERATURE, max_new_tokens=18, seed=self.asked)
                self.engine.add(Request(id=self.asked, token_ids=prompt, params=sampling))
                self.asked += 1

    def decode(self, cycles: int) -> None:
        for _ in range(cycles):
            self.done |= {f.id: f.completion for f in self.engine.step()}

    def look(self, batch: Batch) -> None:
        """At a batch, before the update on it."""

    def step(self) -> dict[str, float]:
        """One update on the oldest batch, whose weights reach the engine in the midst of the next one."""
        first = self.trainer.version * len(PROMPTS) * SIZE
        while not all(first + i in self.done for i in range(len(PROMPTS) * SIZE)):
            self.decode(1)
        answers = [self.done[first + i] for i in range(len(PROMPTS) * SIZE)]
        self.ask()
        self.decode(3)
        batch = _batch(answers, self.trainer.version * len(PROMPTS))
        self.look(batch)
        learned = values(self.trainer.update(batch))
        self.load(self.engine, self.trainer.weights(), self.trainer.version)
        return learned


def _batch(answers: list[Completion], first: int) -> Batch:
    groups = []
    for i, prompt in enumerate(PROMPTS):
        own = answers[i * SIZE : (i + 1) * SIZE]
        asked = Prompt(index=first + i, task="test", text="", token_ids=prompt, item={})
        rewarded = tuple(Trajectory.single(completion=c, reward=float(c.token_ids.sum() % 2)) for c in own)
        groups.append(Group(prompt=asked, trajectories=rewarded))
    return Batch(groups=tuple(groups))


@pytest.mark.slow
@pytest.mark.parametrize("on_update", ["keep", "recompute"])
def test_engine_and_trainer_are_compared_at_every_step(on_update: str) -> None:
    run = Run(on_update)
    found = [run.step() for _ in range(4)]
    for step, metrics in enumerate(found):
        assert metrics["train/ratio_tokens"] >= 6, "at every step"
        assert metrics["train/ratio_error_max"] < 1e-4 and metrics["rollout/logprob_diff_current"] < 1e-5
        # From the second batch on, answers went on across an update: what they kept is far beyond rounding.
        kept = step > 0 and on_update == "keep"
        assert ("rollout/logprob_diff_kept" in metrics) == ("train/ratio_error_kept" in metrics) == kept
        if kept:
            assert metrics["train/ratio_error_kept"] > 0.01 and metrics["rollout/logprob_diff_kept"] > 1e-3
    assert max(metrics["rollout/logprob_diff"] for metrics in found) > 0.01, "the weights move"


def mislabelled(engine: TorchEngine, weights: Mapping[str, Tensor], version: int) -> None:
    """The new version's name on the old weights."""
    engine.load_weights({}, version)


def one_tensor_missing(engine: TorchEngine, weights: Mapping[str, Tensor], version: int) -> None:
    name = next(name for name in weights if "v_proj.weight" in name)
    engine.load_weights({n: w for n, w in weights.items() if n != name}, version)


UNSENT = [(on_update, fault) for fault in (mislabelled, one_tensor_missing) for on_update in ("keep", "recompute")]


@pytest.mark.slow
@pytest.mark.parametrize(("on_update", "fault"), slow_but([("recompute", one_tensor_missing)], UNSENT, several=True))
def test_weights_that_did_not_arrive_are_seen(on_update: str, fault: Load) -> None:
    run = Run(on_update, fault)
    errors = [run.step()["train/ratio_error_max"] for _ in range(4)]
    assert errors[0] < 1e-4 < 1e-2 < max(errors)


def kept_but_said_to_be_recomputed(engine: TorchEngine, weights: Mapping[str, Tensor], version: int) -> None:
    engine.load_weights(weights, version)
    engine.slots.oldest[:] = version


@pytest.mark.slow
def test_keys_and_values_that_are_not_what_the_engine_says_are_seen() -> None:
    run = Run("keep", kept_but_said_to_be_recomputed)
    assert max(run.step()["train/ratio_error_max"] for _ in range(4)) > 1e-2


def test_looking_back_changes_nothing() -> None:
    """Weights and optimizer go on to the bit as without it."""
    trained = []
    for answers in (0, 8):
        trainer = PolicyTrainer(policy(), job(monitor={"check_completions": answers}))
        rows = [values(trainer.update(batch(seed=seed))) for seed in (1, 2, 3)]
        trained.append((trainer.state_dict(), rows))
    (plain, without), (looked, beside) = trained
    for part in ("weights", "optimizer"):
        assert all(torch.equal(plain[part][name], looked[part][name]) for name in plain[part])
    assert "train/ratio_error_max" not in without[1] and without[1]["train/ratio_tokens"] == 0
    assert beside[1]["train/ratio_error_max"] < 1e-4 < 0.05 < beside[1]["rollout/logprob_diff"]
    assert "train/ratio_error_max" not in beside[2], "two updates old, where the bound is one"


def test_a_bound_of_two_updates_looks_back_two() -> None:
    trainer = PolicyTrainer(policy(), job(rollout={"staleness": 2}))
    rows = [values(trainer.update(batch(seed=seed))) for seed in (1, 2, 3, 4)]
    assert ["train/ratio_error_max" in row for row in rows] == [True, True, True, False]
    assert max(row["train/ratio_error_max"] for row in rows[:3]) < 1e-4


def test_nothing_is_compared_with_the_weights_of_before_a_resume() -> None:
    source = PolicyTrainer(policy(), job())
    source.update(batch(seed=1))
    state = source.state_dict()
    other = PolicyTrainer(policy(), job())
    other.update(batch(seed=5))
    other.load_state_dict({**state, "version": 1})
    metrics = values(other.update(batch(seed=2)))
    assert metrics["train/ratio_tokens"] == 0 and "train/ratio_error_max" not in metrics


def test_the_sample_is_spread_over_the_batch() -> None:
    assert (
        evenly_spaced(range(10), 3) == [0, 3, 6]
        and evenly_spaced(range(2), 5) == [0, 1]
        and evenly_spaced(range(4), 0) == []
    )
