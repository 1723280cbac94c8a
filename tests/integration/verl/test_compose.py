"""Every file of the group composes with verl's configuration, and passes verl's checks and ours."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from verl.utils.config import omega_conf_to_dataclass, validate_config

from bebop.model.checkpoint import resolve
from bebop.verl_job import driver
from bebop.verl_job.driver import check_job
from bebop.verl_job.settings import parse
from tests.integration.verl.builders import CONF

PAPER = {"reasoning": (1e-6, 65536), "agent": (2e-6, 126976)}


def composed(name: str, *overrides: str) -> Any:
    spec = find_spec("verl")
    assert spec is not None and spec.submodule_search_locations
    folder = Path(spec.submodule_search_locations[0]) / "trainer" / "config"
    model = f"actor_rollout_ref.model.path={resolve('tiny')}"
    with initialize_config_dir(str(folder), version_base=None):
        return compose("ppo_trainer", [f"hydra.searchpath=[file://{CONF}]", f"+bebop={name}", model, *overrides])


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda name: "0.5.23")


@pytest.mark.parametrize("name", ["reasoning", "agent"])
def test_the_recipes_are_the_papers_settings_and_verl_takes_them(name: str) -> None:
    config = composed(name)
    validate_config(config, use_reference_policy=False, use_critic=False)
    check_job(config, parse(config.bebop))
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    rate, length = PAPER[name]
    assert config.actor_rollout_ref.actor.optim.lr == rate and rollout.response_length == length
    assert rollout.mtp.speculative_num_steps == 3 and rollout.mtp.speculative_eagle_topk == 1
    assert rollout.engine_kwargs["sglang"]["speculative_use_rejection_sampling"] is True
    assert rollout.max_model_len == rollout.prompt_length + rollout.response_length
    assert config.trainer.v1.trainer_mode == "colocate_async"


@pytest.mark.parametrize(
    ("name", "parts"), [("default", ("metrics", "monitor", "sessions")), ("embedded", ("metrics", "monitor"))]
)
def test_the_others_compose_and_pass(name: str, parts: tuple[str, ...]) -> None:
    config = composed(name, "trainer.n_gpus_per_node=8")
    check_job(config, parse(config.bebop))
    assert parse(config.bebop).parts == parts


def test_off_changes_nothing_but_its_own_block() -> None:
    config = composed("off", "actor_rollout_ref.rollout.name=vllm")
    assert parse(config.bebop).parts == ()
    assert set(config) - {"bebop"} == set(composed("default")) - {"bebop"}
    assert not config.actor_rollout_ref.model.mtp.enable


def test_a_mistake_is_found_in_the_composed_configuration() -> None:
    config = composed("reasoning", "actor_rollout_ref.model.mtp.speculative_eagle_topk=4")
    with pytest.raises(ValueError, match="speculative_eagle_topk=4"):
        check_job(config, parse(config.bebop))
