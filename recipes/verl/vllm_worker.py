"""verl's extension of vLLM's workers, on vLLM's second model runner.

verl 0.9.1 finds the MTP head that drafts as ``model_runner.drafter.model``, which the first runner has. The second
runner has no such attribute, and verl then silently leaves the head as it was at the start. Once verl finds the head,
it loads it in two ways that need help:

- float8 weights (``rollout.quantization=fp8``): ``load_quanted_weights`` looks for the head itself, in the same place.
- other weights: the head gets each bucket of an update, most of them without a weight of the MTP layer.
"""

from types import ModuleType, SimpleNamespace
from typing import Any

from bebop.rollout.vllm.plugin import loading_in_parts
from bebop.verl_job.hooks import wrap


def find_draft(utils: ModuleType) -> None:
    """Let verl find the draft model by ``get_draft_model``, which both runners have, and load updates into it."""

    def around(original: Any, worker: Any) -> Any:
        return worker.model_runner.get_draft_model()

    def load_quantized(original: Any, weights: Any, model_runner: Any, is_drafter: bool = False) -> Any:
        if is_drafter:
            drafter = SimpleNamespace(model=model_runner.get_draft_model())
            model_runner = SimpleNamespace(vllm_config=model_runner.vllm_config, drafter=drafter)
        return original(weights, model_runner, is_drafter=is_drafter)

    def update_weights(original: Any, *args: Any, **kwargs: Any) -> Any:
        with loading_in_parts():
            return original(*args, **kwargs)

    wrap(utils.vLLMColocateWorkerExtension, "_get_drafter_model", around)
    wrap(utils.vLLMColocateWorkerExtension, "update_weights_from_ipc", update_weights)
    wrap(utils, "load_quanted_weights", load_quantized)
