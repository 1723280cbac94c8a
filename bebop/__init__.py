"""RL post-training whose rollouts run on speculative decoding that stays fast while the policy explores.

From Python: ``LLM`` generates with drafts, ``train`` runs a job (docs/python.md). Both are imported on first use, since
torch and Ray take seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bebop.grpo import TrainResult, train
    from bebop.llm import LLM, RequestOutput
    from bebop.trajectory import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "TrainResult", "__version__", "train"]
_HOMES = {
    "LLM": "bebop.llm", "RequestOutput": "bebop.llm", "SamplingParams": "bebop.trajectory",
    "TrainResult": "bebop.grpo", "train": "bebop.grpo",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
