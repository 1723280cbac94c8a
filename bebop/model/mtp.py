"""The multi-token-prediction head (SPEC 0.5): it predicts the token after the next one.

Its inputs are a hidden state and the next token. It has two norms, a projection 2d -> d, one decoder layer of the
backbone's own class, and a final norm. The layer has full attention, and has experts where the family's MTP layer has
them. Embedding and language-model head are the backbone's, shared and frozen. Steps beyond the first feed the head its
own output (recursion).
"""

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bebop.errors import UserError
from bebop.model.attention import AttentionContext, ChainContext

if TYPE_CHECKING:  # transformers' modeling code, 4.2 s of processor time to import
    from transformers import PreTrainedModel

FULL = "full_attention"  # transformers' name of the head's kind of layer


class MTPHead(nn.Module):
    """One MTP layer for a backbone; its parameters have the backbone's class, dtype and device."""

    def __init__(self, backbone: "PreTrainedModel", zero_first: bool = True) -> None:
        """Make a head whose weights must still be loaded, or copied from the backbone.

        ``zero_first``: position 0 gets a zero embedding, as MiMo and DeepSeek layers are served.
        """
        super().__init__()
        decoder = backbone.get_decoder()
        config = _layer_config(backbone)
        size = config.hidden_size
        norm, layer = type(decoder.norm), type(decoder.layers[0])
        self.layer_index = config.num_hidden_layers
        self.zero_first = zero_first
        self.token_norm = norm(size, eps=config.rms_norm_eps)
        self.hidden_norm = norm(size, eps=config.rms_norm_eps)
        self.project = nn.Linear(2 * size, size, bias=False)
        self.layer = layer(config, self.layer_index)
        self.final_norm = norm(size, eps=config.rms_norm_eps)
        # A tuple hides the rotary module, so that it is not registered (and saved) twice.
        self._rotary = (decoder.rotary_emb,)
        typed = "layer_type" in signature(decoder.rotary_emb.forward).parameters  # frequencies depend on the layer
        self._rotary_settings = {"layer_type": FULL} if typed else {}
        self.to(dtype=decoder.embed_tokens.weight.dtype, device=decoder.embed_tokens.weight.device)
        # Biases that choose experts stay in float32, as checkpoints hold them and transformers keeps them.
        for module in self.layer.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.float())

    @property
    def rotary(self) -> nn.Module:
        """Return the backbone's rotary embeddings."""
        return self._rotary[0]

    def forward(
        self, embeddings: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext, causal: bool = False
    ) -> Tensor:
        """Run one step for n anchors: embeddings of tokens t+1 and hidden states of t, both [B,n,d] -> hidden [B,n,d].

        ``positions`` [B,n] is t for step 1 and grows by one with each recursive step. The result is normed: the
        language-model head and the next recursive step take it unchanged.

        ``causal``: give the layer a causal mask, for transformers' own attention, which knows no context.
        """
        mask = None
        if causal:
            width = positions.shape[1]
            mask = torch.full((width, width), torch.finfo(hidden.dtype).min, device=hidden.device).triu(1)
            mask = mask.to(hidden.dtype)[None, None]
        if self.zero_first:
            embeddings = embeddings.masked_fill((positions == 0)[..., None], 0)
        x = self.project(torch.cat([self.token_norm(embeddings), self.hidden_norm(hidden)], -1))
        x = self.layer(
            x,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary(x, positions, **self._rotary_settings),
            context=context,
        )
        return self.final_norm(x)


def _layer_config(backbone: "PreTrainedModel") -> Any:
    """Return the configuration of the head's layer: one more layer, which sees the whole text.

    Published MTP layers of hybrids have full attention. Families with windows or soft caps have published none, so
    their fresh heads omit both.
    """
    from bebop.model.attention import ATTENTION  # registers it with transformers, which is imported by now

    config = copy.deepcopy(backbone.config.get_text_config())
    try:
        if getattr(config, "layer_types", None):
            config.layer_types = [*config.layer_types, FULL]
        elif getattr(config, "sliding_window", None):
            config.sliding_window = None
    except AttributeError:  # computed from other settings, which have no layer with full attention
        raise UserError(f"a {config.model_type} model has no layer of full attention, which an MTP head is") from None
    if getattr(config, "attn_logit_softcapping", None):
        config.attn_logit_softcapping = None
    config._attn_implementation = ATTENTION
    return config


def chain(
    head: MTPHead, embeddings: Tensor, hidden: Tensor, steps: int, anchors: Tensor | None = None
) -> Iterator[Tensor]:
    """Run recursive steps on given text, as they run while drafting.

    The inputs are embeddings and hidden states [B,T,d] of the text's tokens.

    Step i (from 1) yields hidden states. Its entry at anchor t predicts token t + i + 1, and is compared with the
    backbone's own distribution at position t + i. Without ``anchors`` every t has a chain and step i yields [B,T-i,d].
    With ``anchors`` [B,A] (positions t) each step yields [B,A,d]; entries of a chain beyond the end of the text are
    meaningless. Only step 1 has to see the whole text, and only its keys and values are used at all positions. So a
    long chain is cheap with few anchors.
    """
    context = ChainContext(anchors)
    length = hidden.shape[1]
    started = torch.zeros(hidden.shape[0], length - 1, dtype=torch.bool, device=hidden.device)
    if anchors is not None:
        started = started.scatter(1, anchors.clamp_max(length - 2), True)
    for step in range(1, steps + 1):
        if anchors is None or step == 1:
            positions = torch.arange(length - step, device=hidden.device).expand(hidden.shape[0], -1)
            fed = embeddings[:, step:]
        else:
            positions = anchors
            fed = gather_rows(embeddings, (anchors + step).clamp_max(length - 1))
        only = anchors is not None and step == 1
        # A head around another library's layer, as megatron-core's, has no ``layer``, and runs all of it everywhere.
        with _mlp_only_at(getattr(head, "layer", None), started) if only else nullcontext():
            hidden = head(fed, hidden[:, : positions.shape[1]], positions + step - 1, context)
        if anchors is not None and step == 1:
            hidden = gather_rows(hidden, anchors.clamp_max(length - 2))
        yield hidden


@contextmanager
def _mlp_only_at(layer: nn.Module | None, chosen: Tensor) -> Iterator[None]:
    """Let a layer's dense MLP see the entries of [B,T,d] that ``chosen`` [B,T] marks; others get 0 from it.

    An MLP is most of a layer's weights, and keys and values do not need it. Experts see all entries, because their
    auxiliary loss counts them.
    """
    mlp = getattr(layer, "mlp", None)
    if mlp is None or any("expert" in name for name, _ in mlp.named_modules()):
        yield
        return

    def pick(_: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (given[0][chosen][None],)

    def put_back(_: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        whole = out.new_zeros(*chosen.shape, out.shape[-1])
        return whole.masked_scatter(chosen[..., None], out)

    hooks = [mlp.register_forward_pre_hook(pick), mlp.register_forward_hook(put_back)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def gather_rows(values: Tensor, positions: Tensor) -> Tensor:
    """Return the entries of [B,T,d] at positions [B,A] -> [B,A,d]."""
    return values.gather(1, positions[..., None].expand(-1, -1, values.shape[-1]))


@torch.no_grad()
def init_from_backbone(head: MTPHead, backbone: "PreTrainedModel") -> None:
    """Start from the backbone's last layer, and from a projection that passes the hidden state through.

    The head then begins as a good next-token predictor one token late, a far better start than noise. In a hybrid, the
    start is the last layer with full attention.
    """
    decoder = backbone.get_decoder()
    head.layer.load_state_dict(_last_of_a_kind(head.layer, decoder.layers).state_dict())
    head.final_norm.load_state_dict(decoder.norm.state_dict())
    size = head.project.out_features
    head.project.weight.zero_()
    head.project.weight[:, size:] = 0.5 * torch.eye(size)
    head.project.weight[:, :size] = 0.5 * torch.eye(size)


def _last_of_a_kind(layer: nn.Module, layers: Iterable[nn.Module]) -> nn.Module:
    """Return the last layer of a backbone with the weights of ``layer``; raise ``UserError`` if there is none."""
    wanted = _shapes(layer)
    found = next((one for one in reversed(list(layers)) if _shapes(one) == wanted), None)
    if found is None:
        raise UserError("no layer of the model has the shape of an MTP layer, so a fresh head cannot start from one")
    return found


def _shapes(layer: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in layer.state_dict().items()}
