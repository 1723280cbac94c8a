"""Three updates of policy and head: every objective beside the policy, and what the policy's own variants give."""

import functools
from collections.abc import Callable
from typing import Any

from bebop.metrics.metrics import values
from bebop.trainer.policy import PolicyTrainer
from tests.digests.numbers import Numbers
from tests.trainer.builders import batch, job, policy

OBJECTIVES = ("tv", "ce", "hard_ce", "kl", "rkl", "nla", "hybrid", "e2e_tv", "e2e_tv_corrected")
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "leave one out, sequence means": {"advantage": "leave_one_out", "aggregation": "seq-mean-token-mean"},
    "mean only, sums": {"advantage": "mean_only", "aggregation": "seq-mean-token-sum-norm", "minibatches": 2},
    "kl, entropy, rescored": {"kl_coefficient": 0.1, "entropy_coefficient": 0.01, "rescore": True},
}


def updates(algorithm: dict[str, Any], objective: str | None) -> Numbers:
    """Metrics of three updates, then all weights and the state to resume from."""
    head = {"objective": objective, "depth": 3, "lr": 1e-2, "lr_warmup_steps": 1, "max_tokens": 64}
    cotrain = {"mode": "off"} if objective is None else {"mode": "always", "head": head}
    source = policy()
    one = PolicyTrainer(source, job(algorithm=algorithm, cotrain=cotrain))
    numbers = Numbers()
    for seed in range(3):
        row = values(one.update(batch(policy(), seed=seed), objective is not None))
        numbers.add(**{f"metric {name}": [float(value)] for name, value in sorted(row.items())})
    for name, tensor in sorted(source.weights(mtp=True).items()):
        numbers.add(**{f"weight {name}": tensor})
    for name, tensor in sorted(one.state_dict()["optimizer"].items()):
        numbers.add(**{f"moment {name}": tensor})
    return numbers


SCENARIOS: dict[str, Callable[[], Numbers]] = {
    **{f"policy {name}": functools.partial(updates, config, None) for name, config in POLICIES.items()},
    **{f"head {name}": functools.partial(updates, {}, name) for name in OBJECTIVES},
    "head tv, two minibatches": functools.partial(updates, {"minibatches": 2}, "tv"),
}
