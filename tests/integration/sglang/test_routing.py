"""SGLang records the experts of its target, for the trainer to replay."""

import dataclasses
from pathlib import Path

import numpy as np

from bebop.config.job import TrainerConfig
from bebop.model.checkpoint import save_policy
from tests.integration.sglang.builders import engine
from tests.model.families import experts_of, mixture
from tests.served_models import answers, ask, job


def test_routing_is_that_of_the_model(tmp_path: Path) -> None:
    policy = mixture(num_attention_heads=1, num_key_value_heads=1, head_dim=32)
    policy.mtp, policy.parts, policy.backbone.config.architectures = None, {}, ["Qwen3MoeForCausalLM"]
    save_policy(policy, tmp_path)
    config = dataclasses.replace(job(tmp_path, "autoregressive"), trainer=TrainerConfig(routing_replay=True))
    with engine(config) as plain:
        first = answers(plain, ask(2, 12))
        again = answers(plain, ask(1, 8))  # its prompt is found in the cache
    for request, done in zip([*ask(2, 12), *ask(1, 8)], [*first, *again], strict=True):
        text, routing = [*request.token_ids, *done.token_ids.tolist()], done.routing
        assert routing is not None and routing.shape == (len(text), 2, 2) and routing.dtype == np.int8
        assert (routing[-1] == -1).all() and np.array_equal(np.sort(routing[:-1], -1), experts_of(policy, text)[:-1])
