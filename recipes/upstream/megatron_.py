"""Defects of megatron-core, found in its source without importing it."""

from importlib.util import find_spec
from pathlib import Path

from recipes.upstream.defect import Defect


def mtp_loss_trains_the_policy() -> bool:
    """Return whether the MTP loss reaches the backbone and its gradient norm, with no setting to detach it."""
    return "mtp_detach_heads" not in _source("transformer/transformer_config.py")


def router_needs_transformer_engine() -> bool:
    """Return whether the router reads the name of a function that exists only with Transformer Engine installed."""
    source = _source("transformer/moe/moe_utils.py")
    return "if te_general_gemm is not None" in source and "te_general_gemm = None" not in source


def _source(file: str) -> str:
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent / file).read_text()


DEFECTS = (
    Defect(name="megatron-mtp-gradient", program="megatron.core", version="0.16.1", there=mtp_loss_trains_the_policy),
    Defect(name="megatron-router", program="megatron.core", version="0.16.1", there=router_needs_transformer_engine),
)
