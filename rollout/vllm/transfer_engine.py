"""How weights get into vLLM's models: the transfer engine ``bebop``, which the plugin makes known to its factory.

``{"table": N}`` names weights that are in this process already, where Ray's object store brought them;
``{"path": FILE}`` a safetensors file. Names are those of checkpoints, and always all of a model's.
"""

from dataclasses import dataclass

from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from bebop.rollout.vllm.transfer import TABLES


@dataclass
class Nothing(WeightTransferInitInfo):
    """What the two sides agree on at first: nothing."""


@dataclass
class Place(WeightTransferUpdateInfo):
    """Where weights are: a table of this process, or a file."""

    table: int | None = None
    path: str | None = None


class BebopTransferEngine(WeightTransferEngine[Nothing, Place]):
    """One update of one model, the target or the draft."""

    init_info_cls, update_info_cls = Nothing, Place

    def init_transfer_engine(self, init_info: Nothing) -> None:
        """Do nothing: there is no process to meet."""

    def start_weight_update(self) -> None:
        """Let layers take checkpoint weights from here on, however they keep theirs."""
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: Place) -> None:
        """Load what is named. A head is loaded without the embedding that it shares, which vLLM would miss."""
        weights = TABLES[update_info.table] if update_info.table is not None else load_file(str(update_info.path))
        with disable_mtp_completeness_check():
            self.model.load_weights((name, tensor) for name, tensor in weights.items())

    def finish_weight_update(self) -> None:
        """Let layers keep their weights as they do again."""
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Do nothing: nothing was started."""
