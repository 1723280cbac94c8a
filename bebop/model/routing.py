"""Expert choices of the routers in a mixture of experts: recorded while decoding, replayed in training.

Two passes over the same tokens can choose different experts, because a router's scores round differently in another
batch. One different expert changes a log-prob by more than rounding does. *Rollout routing replay* (R3, arXiv
2510.11370) records the experts that the engine chose and lets the trainer use them. Their weights still come from the
trainer's own router, and gradients flow through these.

- A context (``bebop.model.attention``) may have a ``routing``, which sees each choice and may replace it. It belongs to
  the context, so a layer that is computed again in the backward pass is routed as before.
- A router of transformers ends its choice in one ``topk`` over its experts. Only that call is replaced, so each family
  weighs the chosen experts by its own rule.
- The head's own router is no router of the backbone: it is neither recorded nor replayed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import getmodule
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.return_types import topk as TopK

from bebop.errors import UserError

# Families whose routers were tested: one ``topk`` over all experts, whose result selects the experts.
FAMILIES = (
    "ernie4_5_moe", "flex_olmo", "glm4_moe", "granitemoe", "hunyuan_v1_moe", "mixtral", "olmoe", "qwen2_moe",
    "qwen3_moe",
)  # fmt: skip
CHOICES = (torch.topk, Tensor.topk)
UNKNOWN = -1  # in place of an expert: the engine did not record the choice, so the trainer's router makes it


class Routing(Protocol):
    """Observer of the routers' choices in a pass over N tokens, which may replace them."""

    def choose(self, place: int, own: Tensor) -> Tensor:
        """Return the experts [N, k] that router ``place`` must use; ``own`` [N, k] are those that it chose."""
        ...

    def see(self, place: int, logits: Tensor) -> None:
        """Receive the logits [N, E] of router ``place``."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Routers:
    """The routers of a backbone, numbered by layer; layers without experts have none."""

    layers: tuple[int, ...]  # [R] layers that have a router
    experts: int  # E
    chosen: int  # k
    balancing: Callable[..., Tensor] | None  # transformers' load balancing loss of the family; None: it has none

    @property
    def count(self) -> int:
        """Return R, the number of routers."""
        return len(self.layers)

    @property
    def dtype(self) -> torch.dtype:
        """Return the smallest type that holds the number of every expert, and ``UNKNOWN``."""
        return torch.int8 if self.experts <= 128 else torch.int16

    @property
    def numpy_dtype(self) -> type[np.int8] | type[np.int16]:
        """Return the NumPy type of ``dtype``."""
        return np.int8 if self.experts <= 128 else np.int16


def of_server(experts: NDArray[np.integer[Any]], routers: Routers) -> NDArray[np.int8 | np.int16]:
    """Return the experts [N, R, k] of a completion in the format of ``Completion.routing``.

    The experts of the last token are unknown. A server gives [N - 1, layers, k], with meaningless rows for layers
    without experts.
    """
    whole = np.full((len(experts) + 1, routers.count, routers.chosen), UNKNOWN, dtype=routers.numpy_dtype)
    whole[:-1] = experts[:, routers.layers]
    return whole


def find_routers(backbone: Any) -> Routers:
    """Return the routers of a backbone; no weights are read.

    Raises:
        UserError: It has no experts, or its family's routers are unsupported.
    """
    kind, found = backbone.config.model_type, _routers(backbone)
    if not found:
        raise UserError(f"a {kind} model without experts has no routing: give a mixture of experts")
    if kind not in FAMILIES:
        raise UserError(f"the routers of {kind} models are not known: give a model of {', '.join(FAMILIES)}")
    sizes = {(router.num_experts, router.top_k) for _, router in found}
    if len(sizes) > 1:
        raise UserError(
            f"the layers of this {kind} model have other numbers of experts: give one where all have as many"
        )
    ((experts, chosen),) = sizes
    balancing = getattr(getmodule(type(backbone)), "load_balancing_loss_func", None)
    layers, decoder = {layer for layer, _ in found}, backbone.get_decoder()
    places = tuple(place for place, layer in enumerate(decoder.layers) if layer in layers)
    return Routers(layers=places, experts=experts, chosen=chosen, balancing=balancing)


def check_routing(backbone: Any, replays: bool, balance: float, stock: bool) -> bool:
    """Return whether a trainer watches the routers of a backbone, which it does for all supported families.

    Args:
        backbone: the model, whose weights are not read.
        replays: ``trainer.routing_replay``.
        balance: ``trainer.router_aux_loss``.
        stock: whether it runs on transformers' own attention, whose layers see no context.

    Raises:
        UserError: One of the two settings is on, and the model does not support it.
    """
    asked = {"trainer.routing_replay": replays, "trainer.router_aux_loss": balance}
    name = next((f"{name}={value!r} is not possible" for name, value in asked.items() if value), "")
    if stock and name:
        raise UserError(
            f"{name}: layers of {backbone.config.model_type} models run as transformers has them; give none"
        )
    if stock:
        return False
    try:
        routers = find_routers(backbone)
    except UserError as error:
        if name:
            raise UserError(f"{name}: {error}") from None
        return False
    if balance and routers.balancing is None:
        kind = backbone.config.model_type
        name = f"trainer.router_aux_loss={balance!r} is not possible"
        raise UserError(f"{name}: transformers has no load balancing loss for {kind} models, give 0")
    return True


def watch_routers(backbone: Any) -> Routers:
    """Make the routers of a backbone obey the ``routing`` of a pass's context; otherwise as ``find_routers``.

    Call it before ``recompute_layers``, so that the backward pass recomputes the watched layers.
    """
    routers = find_routers(backbone)
    for place, (layer, router) in enumerate(_routers(backbone)):
        if not hasattr(router, "routing"):  # else another engine or trainer of this model watches it
            router.routing = None
            layer.forward = partial(_in_context, layer.forward, router)
            router.forward = partial(_routed, router.forward, router, place)
    return routers


def _routers(backbone: Any) -> list[tuple[nn.Module, Any]]:
    """Return the layers that have a router, each with its router."""
    found = []
    for layer in backbone.get_decoder().layers:
        own = [module for module in layer.modules() if type(module).__name__.endswith(("Router", "Gate"))]
        assert len(own) < 2, "one layer has one router"
        found += [(layer, router) for router in own]
    return found


def _in_context(forward: Callable[..., Any], router: Any, *inputs: Any, **settings: Any) -> Any:
    """Run a layer whose router obeys the routing of the context."""
    router.routing = getattr(settings.get("context"), "routing", None)
    try:
        return forward(*inputs, **settings)
    finally:
        router.routing = None


def _routed(forward: Callable[..., Any], router: Any, place: int, *inputs: Any) -> Any:
    """Run a router; the routing sees its choice and may replace it."""
    if router.routing is None:
        return forward(*inputs)
    with _Choice(router.routing, place, router) as choice:
        out = forward(*inputs)
    assert choice.made == 1, f"{type(router).__name__} chooses {choice.made} times"
    router.routing.see(place, out[0])
    return out


class _Choice(TorchFunctionMode):
    """Replaces the one ``topk`` in which a router chooses k of all experts; others are over groups of experts."""

    def __init__(self, routing: Routing, place: int, router: Any) -> None:
        super().__init__()
        self.routing, self.place, self.router, self.made = routing, place, router, 0

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in CHOICES or args[0].shape[1:] != (self.router.num_experts,):
            return out
        assert out.indices.shape[1] == self.router.top_k
        self.made += 1
        experts = self.routing.choose(self.place, out.indices)
        return out if experts is out.indices else TopK((args[0].gather(1, experts), experts))


class Replay:
    """The routing of one pass of the trainer over N tokens: experts that the engine chose, where they are known.

    Its statistics are of the latest pass of each layer, so that a recomputed layer counts once.
    """

    def __init__(self, routers: Routers, recorded: Tensor | None, with_logits: bool = False) -> None:
        """Store the recorded choices.

        Args:
            recorded: [N, R, k], ``UNKNOWN`` where a token's routing is not known; None: nothing was recorded.
            with_logits: whether to keep logits, for ``balancing_loss``.
        """
        self.routers, self.recorded, self.with_logits = routers, recorded, with_logits
        self.loads: dict[int, Tensor] = {}  # router -> [E] times that each expert was used
        self.agreed: dict[int, Tensor] = {}  # router -> tokens whose own choice is the recorded one
        self.known: dict[int, Tensor] = {}  # router -> tokens whose choice was recorded
        self.logits: dict[int, Tensor] = {}  # router -> [N, E]

    def choose(self, place: int, own: Tensor) -> Tensor:
        """Return the recorded experts [N, k] of router ``place`` where they are known, else its ``own``."""
        used = own
        if self.recorded is not None:
            told = self.recorded[:, place].long()
            known = (told != UNKNOWN).all(1)
            used = torch.where(known[:, None], told, own)
            self.known[place] = known.sum()
            self.agreed[place] = ((told.sort(1).values == own.sort(1).values).all(1) & known).sum()
        self.loads[place] = torch.bincount(used.flatten(), minlength=self.routers.experts)
        return used

    def see(self, place: int, logits: Tensor) -> None:
        """Keep the logits [N, E] of router ``place`` with ``with_logits``."""
        if self.with_logits:
            self.logits.setdefault(place, logits)

    def balancing_loss(self) -> Tensor:
        """Return transformers' load balancing loss over the tokens of the pass (Switch Transformer, eq. 4 to 6)."""
        assert self.routers.balancing is not None, "refused before"
        logits = tuple(self.logits[place] for place in range(self.routers.count))
        return self.routers.balancing(logits, self.routers.experts, self.routers.chosen)
