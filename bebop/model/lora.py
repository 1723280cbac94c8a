"""LoRA adapters of a backbone: the adapted layers, their parameters, and the weights for engines.

A layer with an adapter computes W x + s B (A x). W [out, in] is the model's own weight and never changes. A [rank, in]
and B [out, rank] are trained in fp32, and s is ``LoraConfig.scale``. B starts as zeros: the first policy is the model.

- Engines get W + s B A, computed anew from W for every version, so that rounding does not add up over the updates.
- The model without its adapter is the same tensors with the adapter switched off (``Adapter.disabled``).
- Nothing else in the package imports peft. The import takes seconds and happens when an adapter is made.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from bebop.config.fields import check
from bebop.config.job import LoraConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.run_dir.checkpoints import holds_adapter

if TYPE_CHECKING:  # transformers' modeling code, 4.2 s of processor time to import
    from transformers import PreTrainedModel

WEIGHTS = "adapter_model.safetensors"  # peft's name
A, B = ".lora_A.default.weight", ".lora_B.default.weight"  # ends of the names of an adapter's parameters
BASE = ".base_layer."  # what peft adds to the names of W and of the bias


def check_installed(config: LoraConfig) -> None:
    """Raise ``UserError`` if an adapter is configured and peft is not installed."""
    words = "it takes peft: pip install -e '.[lora]' first"
    check(config.rank == 0 or find_spec("peft") is not None, "trainer.lora.rank", config.rank, words)


def adapted_layers(backbone: "PreTrainedModel", config: LoraConfig) -> dict[str, nn.Linear]:
    """Return the linear layers that get an adapter, by their names in the backbone, which may be on the meta device.

    Raises:
        UserError: a name in ``trainer.lora.target_modules`` that no linear layer of the decoder's layers has.
    """
    layers = getattr(backbone.get_decoder(), "layers", ())
    inside = {id(module) for layer in layers for module in layer.modules()}
    linear = {
        name: module
        for name, module in backbone.named_modules()
        if isinstance(module, nn.Linear) and id(module) in inside
    }
    check(bool(linear), "trainer.lora.rank", config.rank, "the model's decoder has no linear layers: give 0")
    for wanted in config.named:
        known = ", ".join(sorted({name.rpartition(".")[2] for name in linear})) or "none"
        words = f"no linear layer of the decoder is called {wanted!r}: give all-linear, or names among {known}"
        shown = list(config.named) if isinstance(config.target_modules, tuple) else wanted
        check(any(_is(name, wanted) for name in linear), "trainer.lora.target_modules", shown, words)
    return {name: m for name, m in linear.items() if not config.named or any(_is(name, w) for w in config.named)}


def _is(name: str, wanted: str) -> bool:
    """Return whether peft matches a module's name with a wanted one."""
    return name == wanted or name.endswith(f".{wanted}")


def adapter_size(backbone: "PreTrainedModel", config: LoraConfig) -> int:
    """Return the number of the adapter's parameters; 0 without an adapter."""
    if not config.rank:
        return 0
    layers = adapted_layers(backbone, config).values()
    return sum(config.rank * (layer.in_features + layer.out_features) for layer in layers)


def merged(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return W + s B A [out, in] of W [out, in], A [rank, in] and B [out, rank], in fp32 or better."""
    wide = torch.promote_types(weight.dtype, a.dtype)
    return torch.addmm(weight.to(wide), b.to(wide), a.to(wide), alpha=scale)


def merge_into(policy: Policy, adapter: Mapping[str, Tensor], config: LoraConfig) -> None:
    """Add a stored adapter to the weights of the model that it was trained for, in place.

    Args:
        policy: the model, without an adapter of its own.
        adapter: full weights, with the names of ``Adapter.named``.
        config: configuration of the adapter.

    Raises:
        UserError: the adapter belongs to another model.
    """
    own = policy.weights()
    for name in (name.removesuffix(A) for name in adapter if name.endswith(A)):
        weight, a, b = own.get(f"{name}.weight"), adapter[name + A], adapter.get(name + B)
        if weight is None or b is None or tuple(weight.shape) != (b.shape[0], a.shape[1]):
            raise UserError(f"the adapter belongs to another model: it does not fit {name.removeprefix('backbone.')}")
        weight.data.copy_(merged(weight.data, a.to(weight.device), b.to(weight.device), config.scale))


def refuse_adapter(folder: Path, name: str) -> None:
    """Raise ``UserError`` for a folder that holds an adapter instead of a model; ``name`` begins the line."""
    if holds_adapter(folder):
        raise UserError(
            f"{name} is not possible: the folder holds a LoRA adapter without its model: "
            "python -m bebop.export --run RUN --out DIR writes the merged model of a run"
        )


def plain_name(name: str) -> str | None:
    """Return a weight's name in the model without an adapter; None for a weight of the adapter itself."""
    return None if name.endswith((A, B)) else name.replace(BASE, ".")


class Adapter:
    """A LoRA adapter in a backbone. All weights but its own are frozen."""

    def __init__(
        self, backbone: "PreTrainedModel", config: LoraConfig, seed: int, base: Path | None = None, stock: bool = False
    ) -> None:
        """Put a fresh adapter into ``backbone``, in place.

        Args:
            backbone: the model that gets the adapter, not split over ranks yet.
            config: rank, scale and layers.
            seed: seed of A, so that all ranks begin with the same one.
            base: the folder of the model, which the adapter's files name.
            stock: the backbone runs on transformers' own attention, see ``Policy.stock``.
        """
        from peft import LoraConfig as PeftConfig
        from peft import inject_adapter_in_model
        from peft.tuners.lora import LoraLayer

        self.backbone, self.scale = backbone, config.scale
        adapted = adapted_layers(backbone, config)
        # In a whole mixture of experts peft would treat stacked experts as layers of the same names, for adapters made
        # with transformers 4. So it gets the decoder's layers alone.
        backbone.requires_grad_(False)
        layers = backbone.get_decoder().layers
        own = {id(module): name for name, module in layers.named_modules()}
        settings: dict[str, Any] = {"r": config.rank, "lora_alpha": config.scale * config.rank}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            names = [own[id(module)] for module in adapted.values()]
            inject_adapter_in_model(PeftConfig(**settings, target_modules=names), layers)
        backbone.eval()
        self.layers: list[Any] = [module for module in layers.modules() if isinstance(module, LoraLayer)]
        assert len(self.layers) == len(adapted), "peft takes other layers than those that were counted"
        ends = {*config.named} or {name.rpartition(".")[2] for name in adapted}
        known = {name for name, _ in backbone.named_modules() if any(_is(name, end) for end in ends)}
        self.config: Any = PeftConfig(
            **settings,
            target_modules=sorted(ends if known == adapted.keys() else adapted),
            task_type="CAUSAL_LM",
            base_model_name_or_path=None if base is None else str(base),
        )
        for layer in self.layers:
            # peft makes A and B in the type of W. In bfloat16 most steps of a usual learning rate would be lost.
            for matrix in (layer.lora_A["default"], layer.lora_B["default"]):
                matrix.to(torch.promote_types(matrix.weight.dtype, torch.float32))
            # Autocast casts x to bfloat16 itself; a copy of x in fp32 would be kept for the backward pass. A frozen
            # backbone on transformers' attention runs without autocast.
            layer.cast_input_dtype_enabled = stock

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Return the adapter's parameters, named ``backbone.*``; split over ranks once the backbone is."""
        return {f"backbone.{name}": p for name, p in self.backbone.named_parameters() if p.requires_grad}

    def merged(self, weights: Mapping[str, Tensor], whole: Callable[[Tensor], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights with the adapter merged in, under the plain model's names, one full tensor at a time.

        Args:
            weights: ``Policy.weights()`` of the policy with the adapter.
            whole: returns the full tensor of a shard; all ranks take part.
        """
        for name, tensor in weights.items():
            if (plain := plain_name(name)) is None:
                continue
            full, layer = whole(tensor.detach()), name.removesuffix(f"{BASE}weight")
            if layer != name:
                a, b = (whole(weights[layer + end].detach()) for end in (A, B))
                full = merged(full, a, b, self.scale)
            yield plain, full

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Switch the adapter off while the block runs; for passes without gradients."""
        self._enable(False)
        try:
            yield
        finally:
            self._enable(True)

    def _enable(self, enabled: bool) -> None:
        for layer in self.layers:
            layer.enable_adapters(enabled)
            # peft freezes a disabled adapter. FSDP2 would treat it as frozen for ever if its first pass were this one.
            for matrix in (layer.lora_A["default"], layer.lora_B["default"]):
                matrix.requires_grad_(True)

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write the adapter in peft's format; ``weights``: its full weights, with the names of ``named``.

        Some mixtures of experts have linear layers with names of stacked experts. There peft rewrites the names as it
        loads the adapter, and fails.
        """
        self.config.save_pretrained(folder)
        named = {
            f"base_model.model.{name.removeprefix('backbone.').replace('.default.', '.')}": tensor.contiguous()
            for name, tensor in weights.items()
        }
        save_file(named, folder / WEIGHTS, metadata={"format": "pt"})
