"""A replay buffer that hands out its batches in one order, whoever finished first: what a comparison to the bit takes.

verl puts answers into a batch in the order in which they end, and names prompts at random.
"""

from typing import Any

import transfer_queue as tq
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class OrderedBuffer(ReplayBuffer):
    """See ``trainer.v1.sampler.custom_sampler``."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, poll_interval=0.1)

    def _materialize_batch(self, partition_id: str, *rest: Any) -> Any:
        batch = super()._materialize_batch(partition_id, *rest)
        data = tq.kv_batch_get(keys=batch.keys, partition_id=partition_id, select_fields=["prompts", "responses"])
        content = [(p.tolist(), r.tolist()) for p, r in zip(data["prompts"], data["responses"], strict=True)]
        order = sorted(range(len(content)), key=lambda i: content[i])
        batch.keys, batch.tags = [batch.keys[i] for i in order], [batch.tags[i] for i in order]
        return batch
