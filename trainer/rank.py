"""One rank of the trainer as a plain class; the runtime makes it a Ray actor (no Ray here).

All ranks get the same calls with the same arguments; each works on its share, and rank 0's results count.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from bebop.command import writing
from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.broadcast import Meeting, WeightSender
from bebop.driver.weights import CheckedWeights, SharedWeights, WeightBuffers, with_manifest
from bebop.metrics.metrics import Metrics
from bebop.model.checkpoint import find_device, load_policy
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.systems import SYSTEMS
from bebop.trainer import checkpoint
from bebop.trainer.certify import Certifier
from bebop.trainer.policy import PolicyTrainer
from bebop.trajectory import Batch, Group


class TrainerRank:
    """Loads the policy, joins the other ranks and serves updates, weights and checkpoints."""

    def __init__(self, config: JobConfig, rank: int = 0, world: int = 1, init_method: str | None = None) -> None:
        """Load the policy and join the process group.

        ``init_method``: where ``world`` > 1 ranks meet, as in torch.distributed (``tcp://...``, ``file://...``).
        """
        torch.set_num_threads(config.trainer.threads)
        torch.manual_seed(config.runtime.seed)  # the same on every rank: a fresh MTP head must be
        sharded = world > 1 and not config.trainer.lora.rank
        needs = SYSTEMS[config.decoding.system].trained_beside
        policy = load_policy(config.model, needs=needs, sharded=sharded, any_backbone=True)  # or the job was refused
        if world > 1:
            device = find_device(config.model)
            cuda = device.type == "cuda"
            if cuda:
                torch.cuda.set_device(device.index or 0)  # "cuda" alone has no index
            dist.init_process_group("nccl" if cuda else "gloo", init_method, rank=rank, world_size=world)
        self.rank, self.buffers = rank, WeightBuffers()
        self.sender = WeightSender(find_device(config.model))
        self.trainer = PolicyTrainer(policy, config, rank, world)
        config = replace(config, trainer=replace(config.trainer, max_tokens=self.trainer.max_tokens))
        self.certifier = Certifier(self.trainer.scorer, self.trainer.old_policies, config, rank, world)

    def update(self, batch: Batch, cotrain: bool = False) -> tuple[Metrics, int]:
        """Learn from a batch; return metrics of all ranks together, and the new version.

        ``cotrain``: the head learns too.
        """
        return self.trainer.update(batch, cotrain), self.trainer.version

    def abandon(self) -> None:
        """Drop the update in progress, unless it has taken a step; another thread may call this."""
        self.trainer.stopping.set()

    def logprobs(self) -> dict[int, NDArray[np.float32]]:
        """Return log p [T] of the latest update's traced completions, by place in the batch; each rank has its rows."""
        return self.trainer.traced.found

    def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        """Read the monitor's fixed texts under the current weights; the result is the same on every rank."""
        return self.trainer.read_probe_set(texts, sweep, decoding)

    def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        """Test completions against the distributions of the weights that wrote them; the result is rank 0's."""
        return self.certifier.read(groups, since, self.trainer.version)

    def version(self) -> int:
        """Return the number of finished updates."""
        return self.trainer.version

    def weights(self, mtp: bool = False, shared: bool = False) -> CheckedWeights | SharedWeights:
        """Return full weights for the engines, on rank 0; the other ranks take part in gathering and return none.

        The head's weights are included with ``mtp``, and always once it has been trained: a replaced engine needs them
        too. With ``shared`` they are written to memory of this machine, from which all engines read.
        """
        mtp = mtp or self.trainer.head_changed
        if not shared:
            return with_manifest(self.trainer.weights(mtp))
        full, layout = self.trainer.full_weights(mtp), self.trainer.layout(mtp)
        if self.rank == 0:
            return self.buffers.write(full, layout)
        for _ in full:
            pass
        return with_manifest({})

    def open_meeting(self, host: str, timeout: float) -> int | str:
        """Open a meeting of receivers at ``host``, and return its port, or why it failed.

        This and the next two methods may be called while others run.
        """
        return self.sender.member.open(host, timeout)

    def send_weights(self, meeting: Meeting, sent: SharedWeights) -> str:
        """Broadcast the weights that ``weights`` has written to memory; return why that failed, or an empty string."""
        return self.sender.send(meeting, sent)

    def stored_weights(self, sent: SharedWeights) -> CheckedWeights:
        """Return the weights that ``weights`` has written to memory, for a machine that no broadcast has reached."""
        return self.sender.stored(sent)

    def head_fingerprint(self) -> str:
        """Return the fingerprint of the head that engines should have now; empty without a head."""
        return self.trainer.head_fingerprint()

    def save(self, folder: Path, loop_state: dict[str, Any]) -> None:
        """Fill and seal ``folder``, which does not exist yet (rank 0 writes); whoever holds the lock publishes it."""
        state = self.trainer.state_dict() | {"certificate": self.certifier.state_dict()}
        if self.rank == 0:
            dtype = torch.bfloat16 if self.trainer.mixed else None
            with writing(folder):
                checkpoint.write(folder, self.trainer.policy, state, loop_state, dtype, self.trainer.adapter)

    def load(self, folder: Path) -> dict[str, Any]:
        """Continue from a checkpoint and return the loop's state in it; raise ``UserError`` for a corrupt file.

        The error names the file.
        """
        saved = checkpoint.load(folder)
        self.trainer.load_state_dict(saved.trainer)
        if "certificate" in saved.trainer:  # else a checkpoint of an earlier version of bebop
            self.certifier.load_state_dict(saved.trainer["certificate"])
        return saved.loop

    def close(self) -> None:
        """Leave the process groups."""
        self.sender.member.close()
        if dist.is_initialized():
            dist.destroy_process_group()
