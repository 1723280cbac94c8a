"""The lines of recipes/adopt/README.md mean to SkyRL, TRL and vLLM what the page says."""

import shlex
import typing
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf
from vllm.config import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs

from tests.documents.pages import lines_of

SAMPLED = {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
Composed = Callable[..., dict[str, Any]]


@pytest.fixture
def skyrl(monkeypatch: pytest.MonkeyPatch) -> Composed:
    """What SkyRL makes of overrides: the configuration of drafts that it starts vLLM with."""
    skyrl = import_module("skyrl")
    # SkyRL's package holds skyrl_gym in a folder of its own.
    monkeypatch.syspath_prepend(str(Path(next(iter(skyrl.__path__))).parent / "skyrl-gym"))
    # Pydantic wants the TypedDict of typing_extensions before Python 3.12, and SkyRL takes that of typing.
    monkeypatch.setattr(typing, "TypedDict", import_module("typing_extensions").TypedDict)
    config, utils = import_module("skyrl.train.config"), import_module("skyrl.train.utils.utils")

    def composed(*overrides: str) -> dict[str, Any]:
        chosen = config.SkyRLTrainConfig.from_cli_overrides(
            ["trainer.strategy=megatron", "trainer.mtp.enabled=true", *overrides]
        )
        utils._apply_mtp_config(chosen)
        return dict(chosen.generator.inference_engine.speculative_config)

    return composed


def test_skyrl_composes_sampled_drafts(skyrl: Composed) -> None:
    (line,) = lines_of("recipes/adopt/README.md", "SkyRL")
    assert skyrl(*shlex.split(line)) == SAMPLED
    assert skyrl().keys() == SAMPLED.keys() - {"draft_sample_method"}  # without the line: greedy
    alone = skyrl("generator.inference_engine.speculative_config.draft_sample_method=probabilistic")
    assert "method" not in alone  # why the page says to give all three


def test_trl_hands_sampled_drafts_to_vllm() -> None:
    from transformers import HfArgumentParser
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    (line,) = lines_of("recipes/adopt/README.md", "TRL")
    serve = import_module("trl.scripts.vllm_serve")  # SkyRL and TRL are in this environment alone, for these tests
    program, command, *arguments = shlex.split(line)
    assert (program, command) == ("trl", "vllm-serve")
    (parsed,) = HfArgumentParser(serve.ScriptArguments).parse_args_into_dataclasses(arguments)
    built = serve.build_command(parsed)
    drafts = built[built.index("--speculative-config") :][:2]
    options = make_arg_parser(FlexibleArgumentParser()).parse_args(["--model", "DIR", *drafts])
    assert options.speculative_config == SAMPLED


def test_nemo_rl_is_given_what_vllm_takes() -> None:
    whole, one = (shlex.split(line) for line in lines_of("recipes/adopt/README.md", "NeMo-RL"))
    (place, text), (key, value) = whole[0].split("=", 1), one[0].split("=", 1)
    assert OmegaConf.to_container(OmegaConf.create(text)) == SAMPLED
    assert (key, value) == (f"{place}.draft_sample_method", SAMPLED["draft_sample_method"])


def test_vllm_takes_these_keys_and_refuses_others(folder: Path) -> None:
    def configured(method: str) -> SpeculativeConfig:
        drafts = SAMPLED | {"draft_sample_method": method}
        arguments = EngineArgs(model=str(folder), speculative_config=drafts, dtype="float32")
        found = arguments.create_engine_config().speculative_config
        assert found is not None
        return found

    assert configured("probabilistic").draft_sample_method == "probabilistic"
    with pytest.raises(ValueError, match="draft_sample_method"):
        configured("sampled")
