"""The MTP head in verl's FSDP2 engine: trained beside the policy, stored with it, sent to the rollout with it.

The policy is not affected: the head sees detached hidden states of the policy's own update (those that its
language-model head reads), has its own optimizer, schedule and gradient norm, and draws no random numbers. One head
step follows each optimizer step of the policy, on the same completions. Every rank keeps a whole head, whose
gradient is summed over the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from bebop.errors import UserError
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_mtp
from bebop.model.mtp import MTPHead
from bebop.trainer.chains import KnownRow
from bebop.trainer.head_backend import WholeBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from bebop.verl_job.hooks import wrap
from bebop.verl_job.names import head_to_checkpoint
from bebop.verl_job.settings import VerlConfig, current

FILE = "bebop_head.pt"  # in the folder of verl's actor checkpoint
ENGINE = "bebop_head"  # the attribute of verl's engine


class HeadBeside:
    """MTP head that one rank's engine trains beside its policy."""

    def __init__(self, engine: Any, module: Any, config: VerlConfig, device: Callable[[], Any]) -> None:
        """Make the head from ``module``, the model not yet split over ranks; ``device`` returns the engine's device."""
        self.engine, self.config, self.device = engine, config, device
        self.layout, head = make_head(Path(engine.model_config.local_path), module, config.init_head)
        # No tokenizer: text is not used here.
        self.policy = Policy(backbone=module, tokenizer=None, mtp=head, layout=self.layout)
        self.rows: list[KnownRow] = []  # of the update in progress
        self.temperature = 1.0
        self._state: Tensor | None = None
        self._keeping = False
        self._trainer: HeadTrainer | None = None
        module.get_decoder().norm.register_forward_hook(self._keep)

    @contextmanager
    def keeping(self, micro_batch: Any) -> Iterator[None]:
        """Keep the hidden states of the forward pass in this block."""
        self._state, self._keeping = None, True
        try:
            yield
        finally:
            self._keeping = False
        if self._state is None:
            raise UserError("bebop.train_head=True: the model ran without its final norm, so no hidden state was seen")
        ids, answers = micro_batch["input_ids"].unbind(), answer_masks(micro_batch)
        self.temperature = first_temperature(micro_batch["temperature"])
        for row, answer, states in zip(ids, answers, split_rows(self._state, [len(row) for row in ids]), strict=True):
            if answer.any() and len(answer) < len(row):
                own = pad(answer, (len(row) - len(answer), 0)).to(row.device)
                self.rows.append(KnownRow(token_ids=row, answer=own, hidden=states))
        self._state = None

    def update(self) -> dict[str, float]:
        """Take one step on the rows of this update; return metrics ``head/*``. All ranks take part."""
        rows, self.rows = self.rows, []
        return self.trainer().update_share(rows)

    def trainer(self) -> HeadTrainer:
        """Return the trainer, which is made at its first use, when the model is on its final device."""
        if self._trainer is None:
            assert self.policy.mtp is not None
            self.policy.backbone = self.engine.module
            self.policy.mtp.to(self.device())
            if self.engine._autocast_dtype == torch.float16:
                raise UserError("bebop.train_head=True: fp16 is not possible; set mixed_precision.param_dtype to bf16")
            mixed = self.engine._autocast_dtype == torch.bfloat16
            sampling = rollout_sampling(self.config, self.temperature)
            backend = WholeBackend(self.policy, sampling, dist.get_rank(), dist.get_world_size(), mixed)
            self._trainer = HeadTrainer(backend, self.config.head, "bebop.head.lr")
        return self._trainer

    def weights(self) -> dict[str, Tensor]:
        """Return the weights for the rollout under the names of the checkpoint; an engine may still lack a head."""
        assert self.policy.mtp is not None
        head = {name: p.detach().to("cpu", copy=True) for name, p in self.policy.mtp.named_parameters()}
        return head_to_checkpoint(head, self.layout, self.policy.backbone.config.num_hidden_layers)

    def save(self, folder: Path) -> None:
        """Write the head beside verl's checkpoint, on rank 0 only: every rank has the whole head."""
        if self._trainer is not None and dist.get_rank() == 0:
            kept = {"state": self._trainer.state_dict(), "temperature": self.temperature}
            torch.save(kept, folder / f"{FILE}.new")
            (folder / f"{FILE}.new").replace(folder / FILE)

    def load(self, folder: Path) -> None:
        """Load the file of ``save``; a checkpoint from before the head was trained leaves the head unchanged."""
        if (folder / FILE).is_file():
            kept = torch.load(folder / FILE, map_location="cpu", weights_only=True)
            self.temperature = kept["temperature"]
            self.trainer().load_state_dict(kept["state"])

    def _keep(self, module: Any, inputs: Any, output: Tensor) -> None:
        if self._keeping:
            self._state = output.detach()


def rollout_sampling(config: VerlConfig, temperature: float = 1.0) -> Sampling:
    """Return the distribution that rollouts sample from, as far as losses know it."""
    return Sampling(temperature=temperature, target_top_p=config.rollout_top_p, target_top_k=config.rollout_top_k)


def make_head(path: Path, module: Any, fresh: bool) -> tuple[str, MTPHead]:
    """Return the head of a checkpoint, the same on every rank; ranks other than 0 may hold an empty model."""
    with torch.random.fork_rng(), _attention(module.config):
        layout, head = load_mtp(path, module, fresh)
    if head is None:
        raise UserError(f"bebop.train_head=True: {path} has no MTP weights; set bebop.init_head=true for a fresh head")
    if next(head.parameters()).is_meta:
        head.to_empty(device="cpu")
    for tensor in (*head.parameters(), *head.buffers()):  # a router's bias is a buffer
        dist.broadcast(tensor.data, src=0)
    return layout, head


def answer_masks(micro_batch: Any) -> list[Tensor]:
    """Return a mask [T] of the policy's tokens for each response, from verl's batches with or without padding.

    Padding is left of prompts and right of responses. Tokens of tools lie between those of the policy.
    """
    mask = micro_batch["response_mask"]
    if mask.is_nested:
        return [row.bool() for row in mask.unbind()]
    lengths = micro_batch["attention_mask"][:, -mask.shape[1] :].sum(1).tolist()
    return [row[:length].bool() for row, length in zip(mask, lengths, strict=True)]


def split_rows(states: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Return states [L, d] of each row, from rows side by side [B, L, d] or end to end [1, N, d], padding last."""
    if states.shape[0] == len(lengths):
        return [row[:length] for row, length in zip(states, lengths, strict=True)]
    assert states.shape[0] == 1 and states.shape[1] >= sum(lengths), (states.shape, lengths)
    return list(states[0, : sum(lengths)].split(list(lengths)))


def train_beside(transformer_impl: ModuleType) -> None:
    """Hook verl's FSDP engine, so that it trains, sends, saves and loads the head."""
    config = current()
    assert config is not None
    engine_class = transformer_impl.FSDPEngineWithLMHead

    def build(original: Any, engine: Any, module: Any) -> Any:
        if not engine.engine_config.forward_only and engine.model_config.model_type == "language_model":
            setattr(engine, ENGINE, HeadBeside(engine, module, config, transformer_impl.get_device_id))
        return original(engine, module)

    def forward(original: Any, engine: Any, micro_batch: Any, loss_function: Any, forward_only: bool) -> Any:
        beside = getattr(engine, ENGINE, None)
        if beside is None or forward_only:
            return original(engine, micro_batch, loss_function, forward_only)
        with beside.keeping(micro_batch):
            return original(engine, micro_batch, loss_function, forward_only)

    def train(original: Any, engine: Any, data: Any, loss_function: Any) -> Any:
        output = original(engine, data, loss_function)
        beside = getattr(engine, ENGINE, None)
        if beside is not None:
            # One list per metric: verl chains the lists of its micro-batches.
            output["metrics"] |= {name: [value] for name, value in beside.update().items()}
        return output

    def send(original: Any, engine: Any, *args: Any, **kwargs: Any) -> Any:
        weights, settings = original(engine, *args, **kwargs)
        beside = getattr(engine, ENGINE, None)
        return (weights if beside is None else chain(weights, beside.weights().items())), settings

    def save(original: Any, engine: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, local_path, *args, **kwargs)
        if getattr(engine, ENGINE, None) is not None:
            getattr(engine, ENGINE).save(Path(local_path))
        return result

    def load(original: Any, engine: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        # Before verl's own: it may be told to delete the folder once it has loaded it.
        if getattr(engine, ENGINE, None) is not None and local_path is not None:
            getattr(engine, ENGINE).load(Path(local_path))
        return original(engine, local_path, *args, **kwargs)

    wrap(engine_class, "_build_fsdp_module", build)
    wrap(engine_class, "forward_step", forward)
    wrap(engine_class, "train_batch", train)
    wrap(engine_class, "get_per_tensor_param", send)
    wrap(engine_class, "save_checkpoint", save)
    wrap(engine_class, "load_checkpoint", load)


@contextmanager
def _attention(config: Any) -> Iterator[None]:
    """Set the attention for head training in the model's configuration, which a head copies in this block."""
    own = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = own


def first_temperature(value: Any) -> float:
    """Return the temperature of the first row, which all rows share."""
    return float(value.flatten()[0]) if isinstance(value, Tensor) else float(value)
