"""A job goes on from its checkpoint to the bit with every decoding system: real loop, worker, trainer, no processes.

``test_job.py`` shows the same of the whole job on Ray.
"""

import asyncio
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from bebop.adaptation.ranks import ALONE
from bebop.bench.gpu.job import InProcess
from bebop.config.compose import adapt_config
from bebop.config.fields import from_dict
from bebop.config.job import CotrainConfig, EvaluationConfig, JobConfig, LoraConfig, ModelConfig
from bebop.driver.evaluation import Evaluation
from bebop.driver.loop import Loop
from bebop.driver.past_completions import PastCompletions
from bebop.model.checkpoint import load_tokenizer, resolve
from bebop.model.parts import has_part
from bebop.rollout.decoding.lengths import EntropyLength
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker
from bebop.systems import PARTS, SYSTEMS
from bebop.tasks.epochs import Epochs
from bebop.tasks.held_out import find_held_out
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trainer import checkpoint
from bebop.trainer.certify import Certifier
from bebop.trajectory import Prompt, SamplingParams
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.writer import TrajectoryLog, piece_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those that do not come with the built-in model, hardly trained."""
    made = {}
    wanted = {part for system in SYSTEMS.values() if not system.train_error for part in system.needs}
    for name in sorted(part for part in wanted if not has_part(ModelConfig(), part)):
        folder = tmp_path_factory.mktemp(name)
        small = ["task=gcd", "data.sequences=4", "data.sampling.max_new_tokens=10", "evaluation.prompts=2"]
        config = adapt_config([f"part={name}", *small, "options.steps=1", "progress=false", f"dir={folder}"])
        training = PARTS[name].job()(config, folder, ALONE)
        training.run()
        made[name] = str(training.written()["part"])
    return made


def job(system: str, steps: int, parts: Mapping[str, str], size: int | None = None) -> JobConfig:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "path": "tiny",
            "device": "cpu",
            "parts": dict(parts),
            "draft": "tiny" if SYSTEMS[system].separate else None,
        },
        "task": {"args": {"min_terms": 8, "max_terms": 11, "min_digits": 1, "max_digits": 1}, "size": size},
        "rollout": {"staleness": 0, "slots": 4, "sampling": {"max_new_tokens": 40}},
        "decoding": {"system": system, "draft_tokens": SYSTEMS[system].draft_tokens},
        "trainer": {"steps": steps, "groups_per_step": 2, "group_size": 3, "save_every": 1, "lr": 1e-3},
        "monitor": {"drift": False, "certify_every": 1},
    }
    return from_dict(JobConfig, sections)


def evaluated(steps: int, **settings: Any) -> JobConfig:
    config = job("bebop", steps, {})
    evaluation = {"every": 2, "size": 3, "samples": 2, **settings}
    return dataclasses.replace(config, evaluation=from_dict(EvaluationConfig, evaluation))


def run(config: JobConfig, folder: Path, resumed: Path | None = None) -> InProcess:
    """A job, or what is left of the one in ``resumed`` after its second step."""
    parts, tokenizer = InProcess(config, folder), load_tokenizer(config.model)
    source = PromptSource(config.task, chat_encoder(tokenizer), 400)
    again = SYSTEMS[config.decoding.system].history  # then the two questions of a step are asked in the next one, too
    past = PastCompletions.wanted(config)
    kept = TrajectoryLog(folder / NAME, "off", piece_of(tokenizer), config.trainer.group_size)

    def prompt(index: int) -> Prompt:
        return dataclasses.replace(source.prompt(index % 2 if again else index), index=index)

    held_out = find_held_out(config, tokenizer)
    evaluation = None if held_out is None else Evaluation(config, held_out)
    loop = Loop(config, prompt, [parts], parts, [parts], None, kept, past, evaluation=evaluation)
    if resumed is not None:
        loop.restore(parts.trainer.load(checkpoint.store(resumed).path(2)))
        if past is not None:
            past.recall(resumed / NAME, 2)
    assert asyncio.run(loop.run())
    kept.close()
    return parts


def differs(system: str, folder: Path, parts: Mapping[str, str], size: int | None = None) -> bool:
    """Whether the third step of a run is another one after a resume from the second."""
    whole = run(job(system, 3, parts, size), folder / "whole")
    half = run(job(system, 3, parts, size), folder / "half", folder / "whole")
    assert [step for step, _ in whole.rows] == [1, 2, 3] and [step for step, _ in half.rows] == [3]
    ours, wanted = (
        checkpoint.load(checkpoint.store(folder / name).path(3)).trainer["weights"] for name in ("half", "whole")
    )
    return half.rows != whole.rows[2:] or any(not torch.equal(ours[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("system", [name for name, system in SYSTEMS.items() if not system.train_error])
def test_a_resumed_job_repeats_an_uninterrupted_one_to_the_bit(
    system: str, parts: dict[str, str], tmp_path: Path
) -> None:
    assert not differs(system, tmp_path, parts)


def test_a_job_resumed_in_the_middle_of_an_epoch_repeats_an_uninterrupted_one_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three questions, two a step: the second step ends in the second epoch, the third in the next to it."""
    assert not differs("bebop", tmp_path / "same", {}, size=3)
    asked: list[int] = []

    def counted(self: Epochs, index: int, attempt: int = 0) -> tuple[int, int]:
        asked.append(index)
        return index // self.count, len(asked) % self.count

    monkeypatch.setattr(Epochs, "place", counted)
    assert differs("bebop", tmp_path / "other", {}, size=3)


def test_a_resumed_job_that_trains_an_adapter_repeats_an_uninterrupted_one_to_the_bit(tmp_path: Path) -> None:
    def adapted(rank: int) -> JobConfig:
        config = job("bebop", 3, {})
        trainer = dataclasses.replace(config.trainer, lr=1e-2, lora=LoraConfig(rank=rank))
        algorithm = dataclasses.replace(config.algorithm, kl_coefficient=0.01, entropy_coefficient=0.1)
        return dataclasses.replace(config, trainer=trainer, algorithm=algorithm, cotrain=CotrainConfig(mode="always"))

    whole = run(adapted(4), tmp_path / "whole")
    half = run(adapted(4), tmp_path / "half", tmp_path / "whole")
    assert half.rows == whole.rows[2:] and [step for step, _ in half.rows] == [3]
    ours, wanted = (checkpoint.load(checkpoint.store(tmp_path / name).path(3)).trainer for name in ("half", "whole"))
    assert all(torch.equal(ours["weights"][name], tensor) for name, tensor in wanted["weights"].items())
    assert all(torch.equal(ours["head"]["weights"][name], t) for name, t in wanted["head"]["weights"].items())
    rows = [row for _, row in whole.rows]
    assert all(row["train/ratio_tokens"] > 0 and row["train/ratio_error_max"] < 1e-3 for row in rows)
    assert rows[0]["train/kl"] == 0 and rows[2]["train/kl"] > 1e-3, "the policy moves by more than the bound"
    # The engine had the merged weights of each version, and the checkpoint holds the adapter alone.
    sizes = {
        path.name: path.stat().st_size for path in checkpoint.store(tmp_path / "whole").path(3).rglob("*.safetensors")
    }
    model = (resolve("tiny") / "model.safetensors").stat().st_size
    assert sizes["adapter_model.safetensors"] < 0.1 * model and "model.safetensors" not in sizes


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.load(checkpoint.store(folder).path(step)).trainer["weights"]
    return found


def without_evaluations(parts: InProcess) -> list[tuple[int, dict[str, float]]]:
    rows = [(step, {k: v for k, v in row.items() if not k.startswith("eval/")}) for step, row in parts.rows]
    return [(step, row) for step, row in rows if step]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, InProcess]:
    """Four steps, evaluated before the first one, after the second and after the last."""
    folder = tmp_path_factory.mktemp("evaluated")
    return folder, run(evaluated(4), folder)


def test_a_job_with_evaluations_trains_the_same_to_the_bit(
    whole: tuple[Path, InProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, beside = whole
    plain = run(job("bebop", 4, {}), tmp_path / "plain")
    assert [step for step, row in beside.rows if "eval/pass_at_1" in row] == [0, 2, 4]
    assert without_evaluations(beside) == plain.rows
    ours, wanted = weights(folder, 4), weights(tmp_path / "plain", 4)
    assert all(torch.equal(ours[name], wanted[name]) for name in wanted)
    # The comparison can fail: seeds that go on counting where training is would be another job.
    params, asked = RolloutWorker._params, list[int]()

    def counted(self: RolloutWorker, completion: int, temperature: float | None = None) -> SamplingParams:
        asked.append(completion)
        return params(self, len(asked) - 1, temperature)

    monkeypatch.setattr(RolloutWorker, "_params", counted)
    assert without_evaluations(run(evaluated(1, size=1), tmp_path / "counting")) != plain.rows[:1]


def test_a_resumed_job_with_evaluations_repeats_an_uninterrupted_one_to_the_bit(
    whole: tuple[Path, InProcess], tmp_path: Path
) -> None:
    folder, parts = whole
    half = run(evaluated(4), tmp_path, folder)
    assert half.rows == parts.rows[3:] and [step for step, _ in half.rows] == [3, 4]
    assert all(torch.equal(weights(tmp_path, 4)[name], one) for name, one in weights(folder, 4).items())


def test_an_evaluation_of_the_same_weights_gives_the_same_result(tmp_path: Path) -> None:
    config = evaluated(2, every=1)
    still = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, lr=0.0))
    rows = run(still, tmp_path).rows
    results = [{k: v for k, v in row.items() if k.startswith("eval/") and k != "eval/best_step"} for _, row in rows]
    assert len(results) == 3 and all(result == results[0] for result in results)


def test_the_evidence_of_a_certificate_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is among the rows that are compared, and one that began again would be another."""
    whole = run(job("bebop", 3, {}), tmp_path / "first")
    tokens = [row["certify/tokens"] for _, row in whole.rows]
    assert tokens == sorted(tokens) and tokens[1] > tokens[2] - tokens[1] > 0
    monkeypatch.setattr(Certifier, "load_state_dict", lambda self, state: None)
    assert differs("bebop", tmp_path, {})


def test_what_an_engine_learns_from_all_requests_is_missed_by_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison can fail: lengths that go on from one answer to the next make another third step."""
    learn = EntropyLength.observe

    def shared(self: EntropyLength, *seen: Any) -> None:
        learn(self, *seen)
        for column in (self.tested, self.passed, self.rate):
            column[:] = column[0].clone()

    start = TorchEngine._admit

    def admit(self: TorchEngine) -> None:
        before = {name: column[:1].clone() for name, column in self.slots.columns.items()}
        start(self)
        for name, column in self.slots.columns.items():
            column[:] = before[name]

    monkeypatch.setattr(EntropyLength, "observe", shared)
    monkeypatch.setattr(TorchEngine, "_admit", admit)
    assert differs("bebop_adaptive", tmp_path, {})


@pytest.mark.parametrize("system", [name for name, system in SYSTEMS.items() if system.history])
def test_a_resume_that_does_not_read_past_answers_back_is_another_run(
    system: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above can fail: what was answered before decides how the third step is drafted."""
    monkeypatch.setattr(PastCompletions, "recall", lambda self, path, step: None)
    assert differs(system, tmp_path, {})
