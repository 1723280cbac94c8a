"""What cannot be done ends in one line, before anything is loaded."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bebop.errors import UserError
from bebop.megatron_job import adapt, convert
from bebop.megatron_job.architecture import check_sizes
from bebop.megatron_job.parallel import ParallelConfig, check_world
from bebop.model.checkpoint import resolve

TINY: dict[str, Any] = {
    "model_type": "qwen2", "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 24, "hidden_act": "silu",
    "intermediate_size": 48, "num_hidden_layers": 3, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "parallel", "message"),
    [
        ({}, {"tensor": 3}, "parallel.tensor=3 does not divide the model's num_attention_heads=4"),
        ({}, {"tensor": 4}, "parallel.tensor=4 does not divide the model's num_key_value_heads=2"),
        ({"vocab_size": 25}, {"tensor": 2}, "parallel.tensor=2 does not divide the model's vocab_size=25"),
        ({}, {"pipeline": 2}, "parallel.pipeline=2 does not divide the model's 3 layers"),
        ({"model_type": "mamba"}, {}, "model_type='mamba' is not known"),
        ({"use_sliding_window": True}, {}, "the model's sliding_window"),
        ({"rope_parameters": {"rope_type": "yarn"}}, {}, "the model's rope_type"),
    ],
)
def test_models_that_do_not_fit(change: dict[str, Any], parallel: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_sizes(SimpleNamespace(**{**TINY, **change}), ParallelConfig(**parallel))


def test_a_model_that_fits() -> None:
    check_sizes(SimpleNamespace(**TINY), ParallelConfig(tensor=2, pipeline=3))


def test_processes_and_context() -> None:
    check_world(ParallelConfig(tensor=2, pipeline=2), 8)
    with pytest.raises(UserError, match="does not divide the 6 processes: start a multiple of 4"):
        check_world(ParallelConfig(tensor=2, pipeline=2), 6)
    with pytest.raises(UserError, match=r"parallel\.context=2 is not possible: a later step's draft reads"):
        ParallelConfig(context=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["parallel.tensors=2"], "parallel.tensors=2 is not possible: no such setting"),
        (["parallel.tensor=two"], "parallel.tensor='two' is not possible"),
        (["parallel.tensor=2"], "does not divide the 1 processes"),
        (["parallel.evaluate=false"], "set data.source=file"),
        (["--fast"], "--fast is no option"),
        (["head.lrr=1"], "head.lrr: no such setting"),
    ],
)
def test_command_lines(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        adapt.main(arguments)


def test_help_and_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt.main(["--help"]) == 0 and "parallel.tensor" in capsys.readouterr().out
    assert adapt.main(["--cfg", "parallel.pipeline=2"]) == 0 and "pipeline: 2" in capsys.readouterr().out
    assert convert.main(["--help"]) == 0 and "to-huggingface" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["to-nemo"], "'to-nemo' is not possible"),
        (["to-megatron", "model=tiny"], "out is missing"),
        (["to-megatron", "model=tiny", "into=x"], "into=x: no such setting"),
    ],
)
def test_conversions(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert.main(arguments)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    from bebop.config.job import ModelConfig
    from bebop.megatron_job.source import Checkpoint

    (tmp_path / "config.json").write_text((resolve("tiny") / "config.json").read_text())
    with pytest.raises(UserError, match=r"weight model\.norm\.weight is missing"):
        Checkpoint(ModelConfig(path=str(tmp_path))).head()
