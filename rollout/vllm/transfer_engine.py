"""The transfer engine ``bebop``, which loads weights into vLLM's models; the plugin registers it.

``{"table": N}`` names weights that are in this process already, where Ray's object store brought them. ``{"path":
FILE}`` names a safetensors file. The names of weights are those of checkpoints, and always all of a model's.
"""

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from bebop.rollout.vllm.transfer import TABLES


@dataclass
class Nothing(WeightTransferInitInfo):
    """Data of the first handshake: empty."""


@dataclass
class Place(WeightTransferUpdateInfo):
    """Location of weights: a table of this process, or a file."""

    table: int | None = None
    path: str | None = None


class BebopTransferEngine(WeightTransferEngine[Nothing, Place]):
    """Weight transfer of one update of one model, the target or the draft."""

    init_info_cls, update_info_cls = Nothing, Place

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: there is no other process to connect to."""

    def start_weight_update(self) -> None:
        """Prepare layers for checkpoint weights, whatever the format of theirs."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Place) -> None:
        """Load the weights at a place.

        A head comes without the embedding that it shares, so vLLM's completeness check is off.
        """
        weights = TABLES[update_info.table] if update_info.table is not None else load_file(str(update_info.path))
        with disable_mtp_completeness_check():
            self.model.load_weights((name, tensor) for name, tensor in weights.items())

    def finish_weight_update(self) -> None:
        """Convert the loaded weights back to each layer's own format."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: nothing was started."""
