"""Names of weights: verl uses the names of the checkpoint, the embedded engine those of its modules."""

from collections.abc import Mapping

from torch import Tensor

from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.layouts import LAYOUTS, from_layout, to_layout


def head_to_checkpoint(head: Mapping[str, Tensor], layout: str, layers: int) -> dict[str, Tensor]:
    """Return the weights of an ``MTPHead`` under the names of a checkpoint layout."""
    return to_layout(dict(head), LAYOUTS[layout], layers)


def checkpoint_to_engine(weights: Mapping[str, Tensor], policy: Policy) -> dict[str, Tensor]:
    """Return a checkpoint's weights under the names of ``Engine.load_weights``, without tied ones.

    Raises ``UserError`` if a weight of the backbone is missing: an engine with weights of two versions follows no
    distribution.
    """
    layers = policy.backbone.config.num_hidden_layers
    layout = LAYOUTS[policy.layout]
    prefix = layout.prefix.format(L=layers)
    own = policy.weights(mtp=True)
    named = {f"backbone.{name}": tensor for name, tensor in weights.items() if not name.startswith(prefix)}
    tied = {f"backbone.{name}" for name in policy.backbone.state_dict()} - set(own)
    named = {name: tensor for name, tensor in named.items() if name not in tied}
    missing = [name for name in policy.weights() if name not in named]
    if missing:
        raise UserError(f"the trainer sent weights without {missing[0]} and {len(missing) - 1} more")
    head = {name: tensor for name, tensor in weights.items() if name.startswith(prefix)}
    if head and policy.mtp is None:
        raise UserError(f"the trainer sent an MTP head ({next(iter(head))}), and the engine was started without one")
    if head and policy.mtp is not None:
        wanted = [name for name, _ in policy.mtp.named_parameters()]
        named |= {f"mtp.{name}": tensor for name, tensor in from_layout(head, layout, layers, wanted).items()}
    return named
