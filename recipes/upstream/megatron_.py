"""megatron-core, read without importing it."""

from importlib.util import find_spec
from pathlib import Path

from recipes.upstream.defect import Defect


def mtp_loss_trains_the_policy() -> bool:
    """The loss of the MTP layers reaches the backbone and its gradient norm, and no setting keeps it out."""
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return "mtp_detach_heads" not in (Path(spec.origin).parent / "transformer" / "transformer_config.py").read_text()


DEFECTS = (
    Defect(name="megatron-mtp-gradient", program="megatron.core", version="0.16.1", there=mtp_loss_trains_the_policy),
)
