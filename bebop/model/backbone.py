"""A policy: a Hugging Face causal LM as backbone, its tokenizer and (if there is one) its MTP head."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerBase

from bebop.errors import UserError
from bebop.model.attention import AttentionContext
from bebop.model.fingerprint import fingerprint
from bebop.model.mtp import MTPHead
from bebop.model.products import product

if TYPE_CHECKING:  # transformers' modeling code, 4.2 s of processor time to import
    from transformers import PreTrainedModel


def stop_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every token that ends an answer, in order."""
    ids = generation.eos_token_id if generation is not None else None
    listed = [ids] if isinstance(ids, int) else list(ids or ())
    own = tokenizer.eos_token_id
    return tuple(sorted({*listed, *([own] if isinstance(own, int) else [])}))


@dataclass(slots=True, kw_only=True)
class Policy:
    """What a checkpoint holds, loaded. ``mtp`` is None where the checkpoint has no MTP weights."""

    backbone: "PreTrainedModel"
    tokenizer: PreTrainedTokenizerBase
    mtp: MTPHead | None
    layout: str  # the checkpoint layout that the MTP weights came in; see bebop.model.checkpoint
    parts: dict[str, nn.Module] = field(default_factory=dict)  # trained ones, see bebop.model.parts
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)  # types that a checkpoint of it has, by its names

    def hidden(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Final, normed hidden states [B,n,d] of token ids [B,n] at ``positions`` [B,n]."""
        decoder = self.backbone.get_decoder()
        out = decoder(input_ids=token_ids, position_ids=positions, use_cache=False, context=context)
        return out.last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Language-model head: [..., d] -> [..., V]."""
        head = self.backbone.get_output_embeddings()
        if torch.is_grad_enabled() or type(head) is not nn.Linear or head._forward_pre_hooks:
            out: Tensor = head(hidden)
            return out
        return product(hidden, head.weight, head.bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Token embeddings: [...] -> [..., d]."""
        return self.backbone.get_input_embeddings()(token_ids)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.backbone.get_input_embeddings().weight.device

    @property
    def vocab_size(self) -> int:
        """Rows of the language-model head."""
        return int(self.backbone.config.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every token that ends an answer, by the tokenizer and the generation settings."""
        return stop_token_ids(self.backbone.generation_config, self.tokenizer)

    def modules(self) -> list[nn.Module]:
        """The modules that hold weights: the backbone, then the head if there is one."""
        return [self.backbone] if self.mtp is None else [self.backbone, self.mtp]

    def weights(self, mtp: bool = False) -> dict[str, Tensor]:
        """Named weights to be sent to an engine: ``backbone.*`` and, if asked for, ``mtp.*``; shared ones once."""
        named = {f"backbone.{name}": p for name, p in self.backbone.named_parameters()}
        if mtp and self.mtp is not None:
            named |= {f"mtp.{name}": p for name, p in self.mtp.named_parameters()}
        return named

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights, named as ``weights`` names them, into place; ``UserError`` for a name that is not known."""
        own = self.weights(mtp=True)
        unknown = [name for name in weights if name not in own]
        if unknown:
            raise UserError(f"weights do not fit the model: {unknown[0]} and {len(unknown) - 1} more are not known")
        for name, tensor in weights.items():
            own[name].data.copy_(tensor)

    def head_fingerprint(self) -> str:
        """Of the MTP head; empty where there is none."""
        return "" if self.mtp is None else fingerprint(dict(self.mtp.named_parameters()))


def head_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The head's among weights that are named as ``Policy.weights`` names them, under the head's own names."""
    return {name.removeprefix("mtp."): tensor for name, tensor in weights.items() if name.startswith("mtp.")}


def shared_tables(policy: Policy) -> tuple[Tensor, Tensor]:
    """Embedding and language-model head of the target, both [V, d]."""
    backbone = policy.backbone
    embedding, head = backbone.get_input_embeddings().weight, backbone.get_output_embeddings().weight
    return embedding.detach(), head.detach()
