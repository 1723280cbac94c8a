"""What vLLM has for the drafters of ours: a row each, of properties that others ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bebop.config import DecodingConfig
from bebop.options import HistoryOptions
from bebop.rollout.decoding.ngram import MAX_SUFFIX
from bebop.rollout.vllm import suffixes
from bebop.systems import SYSTEMS
from bebop.systems.base import System


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How vLLM drafts in the place of a drafter, and what of it can be chosen."""

    arguments: Callable[[DecodingConfig], dict[str, Any] | None]  # its speculative_config
    sampled: bool = True  # drafts can be draws from q
    model: bool = False  # it drafts with weights, which updates may reach
    package: str = ""  # what it needs beside vLLM, as it is imported
    past: Callable[[DecodingConfig], int] | None = None  # tokens of past answers that it keeps; None: it takes none


def head_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Drafts of the MTP head in the target's checkpoint; vLLM's own default is greedy."""
    method = "probabilistic" if SYSTEMS[decoding.system].sampled else "greedy"
    return {"method": "mtp", "num_speculative_tokens": decoding.limit, "draft_sample_method": method}


def ngram_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """What followed the longest suffix that occurred before, as the embedded engine looks it up."""
    return {
        "method": "ngram",
        "num_speculative_tokens": decoding.limit,
        "prompt_lookup_max": MAX_SUFFIX,
        "prompt_lookup_min": 1,
    }


def suffix_arguments(decoding: DecodingConfig) -> dict[str, Any]:
    """Suffix decoding (Oliaro et al. 2024), whose tree is kept within bounds from outside, see ``suffixes.py``."""
    return {
        "method": "suffix",
        "num_speculative_tokens": decoding.limit,
        "suffix_decoding_max_tree_depth": suffixes.LONGEST + decoding.limit,
        "suffix_decoding_max_cached_requests": UNBOUNDED,
        "suffix_decoding_max_spec_factor": suffixes.STRETCH,
    }


UNBOUNDED = (1 << 31) - 1  # requests, the most that it counts to
HOSTINGS = {  # by drafter
    "none": Hosting(arguments=lambda decoding: None),
    "mtp": Hosting(arguments=head_arguments, model=True),
    "ngram": Hosting(arguments=ngram_arguments, sampled=False),
    "history": Hosting(
        arguments=suffix_arguments,
        sampled=False,
        package="arctic_inference",
        past=lambda decoding: decoding.of(HistoryOptions).tokens,
    ),
}


def missing(system: System) -> str | None:
    """What vLLM lacks for a system; None if it hosts it, and "" where there is no more to say."""
    if system.serve_error:
        return f"{system.serve_error}; "
    hosting = HOSTINGS.get(system.drafter_name)
    if hosting is None or system.custom_cycle:
        return f"it has no drafter {system.drafter_name!r}; " if hosting is None else ""
    if system.rule_name != "rejection":
        return f"it verifies by rejection sampling alone, not by {system.rule_name!r}; "
    if not system.fixed_length:
        return "it has one number of drafts for all requests; "
    return None


HOSTED = [name for name, system in SYSTEMS.items() if missing(system) is None]
