"""The monitor on the embedded engine with the built-in model, whose head or temperature is changed on purpose."""

from collections.abc import Callable, Iterator

import pytest
import torch

from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.checkpoint import load_policy
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings
from bebop.monitor.probe_set import Sweep
from bebop.monitor.records import StepRecords, from_groups
from bebop.monitor.window import Measure
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import Group, SamplingParams, Trajectory
from tests.monitor.synthetic import sweep_of

pytestmark = pytest.mark.slow
PROMPTS, ANSWERS = 12, 5
TASK = {"min_terms": 8, "max_terms": 11, "min_digits": 1, "max_digits": 1}
LENGTH = Measure(rate="overlap")


class Rollouts:
    """Steps of sampled answers; every step has new prompts."""

    def __init__(self) -> None:
        self.policy = load_policy(ModelConfig(path="tiny"))
        assert self.policy.mtp is not None
        self.head = {name: value.clone() for name, value in self.policy.mtp.state_dict().items()}
        self.engine = TorchEngine(self.policy, DecodingConfig(draft_tokens=3), slots=48)
        self.prompts = PromptSource(TaskConfig(args=TASK), chat_encoder(self.policy.tokenizer), 200)
        self.step = 0

    def spoil(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        assert self.policy.mtp is not None
        self.policy.mtp.load_state_dict({name: change(value) for name, value in self.head.items()})

    def records(self, temperature: float = 1.0, first: int | None = None) -> StepRecords:
        self.step += 1
        start = PROMPTS * self.step if first is None else first
        prompts = [self.prompts.prompt(start + i) for i in range(PROMPTS)]
        sampling = {"temperature": temperature, "max_new_tokens": 160, "stop_token_ids": self.policy.eos_token_ids}
        seeded = [(i, SamplingParams(seed=99 * start + i, **sampling)) for i in range(PROMPTS * ANSWERS)]
        requests = [Request(id=i, token_ids=prompts[i // ANSWERS].token_ids, params=params) for i, params in seeded]
        answers = generate(self.engine, requests)
        groups = [
            Group(
                prompt=prompt,
                trajectories=tuple(
                    Trajectory.single(completion=c, reward=0.0) for c in answers[p * ANSWERS : (p + 1) * ANSWERS]
                ),
            )
            for p, prompt in enumerate(prompts)
        ]
        return from_groups(groups, self.step, self.step)


@pytest.fixture(scope="module")
def rollouts() -> Rollouts:
    torch.set_num_threads(1)
    return Rollouts()


@pytest.fixture(scope="module")
def start(rollouts: Rollouts) -> tuple[list[StepRecords], Sweep]:
    """The reference, and the same prompts at several temperatures."""
    steps = [rollouts.records() for _ in range(6)]
    temperatures = (0.6, 0.8, 1.0, 1.2, 1.4, 1.6, 1.8)
    return steps, sweep_of([rollouts.records(temperature, first=0) for temperature in temperatures], LENGTH)


def after(start: tuple[list[StepRecords], Sweep], events: Iterator[StepRecords]) -> list[Explanation]:
    """What is said about three steps that follow the reference."""
    steps, sweep = start
    monitor = DriftMonitor(MonitorSettings(rate="overlap"))
    for records in steps:
        explanation = monitor.observe(records, sweep=sweep)
        assert explanation is not None and explanation.state == "steady"
    return [explanation for records in events if (explanation := monitor.observe(records)) is not None]


def test_noise_on_the_head_is_mismatch(rollouts: Rollouts, start: tuple[list[StepRecords], Sweep]) -> None:
    generator = torch.Generator().manual_seed(0)

    def noisy(value: torch.Tensor) -> torch.Tensor:
        return value + 0.6 * value.std() * torch.randn(value.shape, generator=generator) if value.dim() > 1 else value

    rollouts.spoil(noisy)
    explanations = after(start, (rollouts.records() for _ in range(3)))
    rollouts.spoil(lambda value: value)
    assert explanations[-1].state == "mismatch-driven" and "cotrain_start" in {e.action.kind for e in explanations}
    assert (
        abs(explanations[-1].parts["length"].entropy.point) < 0.02
    )  # the policy is the same; only which tokens are drafted moved


def test_a_zeroed_head_is_broken_at_once(rollouts: Rollouts, start: tuple[list[StepRecords], Sweep]) -> None:
    rollouts.spoil(torch.zeros_like)
    explanations = after(start, (rollouts.records() for _ in range(2)))
    rollouts.spoil(lambda value: value)
    assert [e.state for e in explanations] == ["broken", "broken"]


def test_a_higher_temperature_is_entropy(rollouts: Rollouts, start: tuple[list[StepRecords], Sweep]) -> None:
    explanations = after(start, (rollouts.records(temperature=1.7) for _ in range(3)))
    assert explanations[-1].state == "entropy-driven" and {e.action.kind for e in explanations} == {"none"}
    mismatch = explanations[-1].parts["length"].mismatch
    assert mismatch.low <= 0 <= mismatch.high


def test_slopes_between_answers_are_steeper_than_those_of_temperature(start: tuple[list[StepRecords], Sweep]) -> None:
    """Why a slope over answers is not believed alone: questions with high entropy are harder for the head, too."""
    steps, sweep = start
    monitor = DriftMonitor(MonitorSettings(rate="overlap"))
    explanation = [monitor.observe(records, sweep=sweep) for records in steps][-1]
    assert explanation is not None
    assert explanation.slopes["frozen"].value.high < explanation.slopes["temperature"].value.low < 0
