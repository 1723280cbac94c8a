"""What a trainer's state holds beside weights and moments, and that it is a copy."""

import math

import pytest
import torch

from bebop.errors import UserError
from bebop.trainer.policy import PolicyTrainer
from tests.trainer.builders import batch, job, policy
from tests.trainer.test_policy import changed


def trained(updates: int = 1) -> PolicyTrainer:
    trainer = PolicyTrainer(policy(), job())
    for seed in range(updates):
        trainer.update(batch(seed=seed))
    return trainer


def test_random_numbers_go_on_where_they_stood() -> None:
    trainer = trained()
    torch.manual_seed(17)
    torch.rand(3)
    state = trainer.state_dict()
    wanted = torch.rand(5)
    torch.manual_seed(99)
    PolicyTrainer(policy(), job()).load_state_dict(state)
    assert torch.equal(torch.rand(5), wanted)


def test_every_rank_goes_on_with_its_own_random_numbers() -> None:
    state = trained().state_dict()
    own = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        own.append({"cpu": torch.get_rng_state(), "cuda": []})
    torch.manual_seed(2)
    wanted = torch.rand(5)
    second = PolicyTrainer(policy(), job())
    second.rank = 1
    second.load_state_dict(state | {"rng": own})
    assert torch.equal(torch.rand(5), wanted)


def test_a_loaded_state_is_not_changed_by_what_is_learned_from_it() -> None:
    state = trained().state_dict()
    kept = {name: moment.clone() for name, moment in state["optimizer"].items()}
    one = PolicyTrainer(policy(), job())
    one.load_state_dict(state)
    one.update(batch(seed=5))
    assert all(torch.equal(state["optimizer"][name], kept[name]) for name in kept)


def test_a_trainer_that_learned_already_forgets_it() -> None:
    """Moments that the state does not have would otherwise be those of another run."""
    fresh = PolicyTrainer(policy(), job()).state_dict()
    assert not fresh["optimizer"]
    used = trained(2)
    used.load_state_dict(fresh)
    assert not used.state_dict()["optimizer"] and used.version == 0


def test_steps_skipped_in_a_row_are_counted_across_a_resume() -> None:
    good = batch()
    bad = changed(good, logprobs=good.groups[0].trajectories[0].completion.logprobs * math.nan)
    first = PolicyTrainer(policy(), job())
    first.update(bad)
    first.update(bad)
    again = PolicyTrainer(policy(), job())
    again.load_state_dict(first.state_dict())
    with pytest.raises(UserError, match="not finite"):
        again.update(bad)
