"""What a cluster recipe starts through verl: verl has every one of its settings, and its checks and ours pass."""

import pytest
from verl.utils.config import omega_conf_to_dataclass, validate_config

from bebop.verl_job import driver
from bebop.verl_job.driver import check_job
from bebop.verl_job.settings import parse
from recipes.cluster.recipe import load, names
from recipes.cluster.start import verl_overrides
from tests.integration.verl.test_compose import composed

VERL = [name for name in names() if load(name).file.trainer == "verl"]


@pytest.mark.parametrize("name", VERL)
def test_verl_takes_the_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "version", lambda name: "0.5.23")
    recipe = load(name)
    config = composed(recipe.file.group, *verl_overrides(recipe))
    validate_config(config, use_reference_policy=False, use_critic=False)
    check_job(config, parse(config.bebop))
    rollout, fleet = omega_conf_to_dataclass(config.actor_rollout_ref.rollout), recipe.simulation.fleet
    trainer = config.trainer.nnodes * config.trainer.n_gpus_per_node
    engines = rollout.nnodes * rollout.n_gpus_per_node
    assert trainer == fleet.trainer_gpus and trainer + engines == recipe.gpus
    assert engines == fleet.workers * rollout.tensor_model_parallel_size
    assert config.data.train_batch_size * rollout.n == fleet.groups_per_step * fleet.group_size
    assert rollout.response_length == recipe.simulation.completions.longest
    assert rollout.max_model_len >= rollout.prompt_length + rollout.response_length
    assert config.ray_kwargs.ray_init.address == "auto"
