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
MOE: dict[str, Any] = {
    "model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True,
    "mlp_only_layers": [], "decoder_sparse_step": 1, "moe_intermediate_size": 16,
}  # fmt: skip
GLM: dict[str, Any] = {
    "model_type": "glm4_moe", "n_routed_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True, "n_group": 1,
    "first_k_dense_replace": 0, "moe_intermediate_size": 15, "n_shared_experts": 1, "routed_scaling_factor": 1.0,
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
        ({}, {"expert": 2}, "parallel.expert=2: a qwen2 model like this one has no experts"),
        (MOE, {"expert": 3}, "parallel.expert=3 does not divide the model's 4 experts"),
        (MOE | {"num_experts_per_tok": 1}, {}, "norm_topk_prob=True with num_experts_per_tok=1 is a router that"),
        (GLM, {"tensor": 2}, "parallel.tensor=2 does not divide the model's shared experts' width=15"),
        (GLM | {"n_group": 2}, {}, "the model's n_group=2 is one that bebop.megatron_job does not have"),
        (GLM | {"norm_topk_prob": False}, {}, "norm_topk_prob=False with num_experts_per_tok=2 is a router that"),
    ],
)
def test_models_that_do_not_fit(change: dict[str, Any], parallel: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_sizes(SimpleNamespace(**{**TINY, **change}), ParallelConfig(**parallel))


def test_a_model_that_fits() -> None:
    check_sizes(SimpleNamespace(**TINY), ParallelConfig(tensor=2, pipeline=3))
    check_sizes(SimpleNamespace(**TINY | MOE), ParallelConfig(expert=4))
    check_sizes(SimpleNamespace(**TINY | GLM), ParallelConfig(expert=2, context=2))


def test_processes() -> None:
    check_world(ParallelConfig(tensor=2, pipeline=2), 8)
    with pytest.raises(UserError, match="does not divide the 6 processes: start a multiple of 4"):
        check_world(ParallelConfig(tensor=2, pipeline=2), 6)
    check_world(ParallelConfig(tensor=2, context=2, expert=4), 4)
    both = "tensor=2 times parallel.context=2"
    for settings, given in (({"expert": 4}, "expert=4"), ({"tensor": 2, "context": 2}, both)):
        with pytest.raises(UserError, match=rf"parallel\.{given} does not divide the 6 processes: start a multiple"):
            check_world(ParallelConfig(**settings), 6)
    for name in ("context", "expert"):
        with pytest.raises(UserError, match=rf"parallel\.{name}=0 is not possible: give 1 or more"):
            ParallelConfig(**{name: 0})


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
