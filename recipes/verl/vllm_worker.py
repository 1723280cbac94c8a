"""verl's extension of vLLM's workers, on vLLM's second model runner.

verl 0.9.1 finds the MTP head that drafts as ``model_runner.drafter.model``, which the first runner has. The second
runner has no such attribute, and verl then silently leaves the head as it was at the start.
"""

from types import ModuleType
from typing import Any

from bebop.verl_job.hooks import wrap


def find_draft(utils: ModuleType) -> None:
    """Let verl find the draft model by ``get_draft_model``, which both runners have."""

    def around(original: Any, worker: Any) -> Any:
        return worker.model_runner.get_draft_model()

    wrap(utils.vLLMColocateWorkerExtension, "_get_drafter_model", around)
