"""What SGLang has for the drafters of ours: a row each, of properties that others ask for."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.config import DecodingConfig
from bebop.config_engines import SglangConfig
from bebop.rollout.sglang import dflash
from bebop.systems import SYSTEMS
from bebop.systems.base import System


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosting:
    """How SGLang drafts in the place of a drafter, and what of it can be chosen."""

    algorithms: tuple[str | None, ...]  # what a server calls it
    arguments: Callable[[DecodingConfig, SglangConfig, Path], dict[str, Any]]  # how it is started, target in a folder
    wanted: Callable[[DecodingConfig], dict[str, tuple[Any, ...]]]  # what a server must say of itself: right values
    lengths: tuple[str, ...] = ("fixed",)  # modules of rollout/decoding/lengths that it can follow
    sampled: bool = True  # drafts can be draws from q
    cpu: bool = True  # Triton's interpreter runs it where there is no GPU
    seeded: bool = True  # with deterministic inference, answers have random numbers of their own
    measured: bool = True  # the plugin sees its drafts
    refuse: Callable[[DecodingConfig, SglangConfig, Path], None] | None = None  # the drafter, where it has a folder


def head_arguments(decoding: DecodingConfig, own: SglangConfig, folder: Path) -> dict[str, Any]:
    """Drafts of the MTP head in the target's checkpoint."""
    arguments: dict[str, Any] = {
        "speculative_algorithm": "NEXTN",
        "speculative_draft_model_path": str(folder),
        "speculative_num_steps": decoding.limit,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": decoding.limit + 1,
        "speculative_use_rejection_sampling": SYSTEMS[decoding.system].sampled,
    }
    if own.block_verification:
        arguments["speculative_use_block_verification"] = True
    if SYSTEMS[decoding.system].length_name == "entropy":
        arguments["speculative_adaptive"] = True
        if own.adaptive_steps is not None:
            arguments["speculative_adaptive_config"] = own.adaptive_steps
    return arguments


def head_wanted(decoding: DecodingConfig) -> dict[str, tuple[Any, ...]]:
    """The same of a running server."""
    system = SYSTEMS[decoding.system]
    steps = {"speculative_num_steps": (decoding.limit,)} if system.fixed_length else {}
    return {
        "speculative_eagle_topk": (1,),
        "speculative_use_rejection_sampling": (system.sampled,),
        "speculative_accept_threshold_single": (1.0,),
        "speculative_accept_threshold_acc": (1.0,),
        **steps,
    }


# What it has for these would be NGRAM, fed by /add_external_corpus.
PADDED = (
    "its NGRAM drafts are not verified exactly: they are filled up with token 0, and each of those counts as another "
    "draft of it (docs/upstream.md); "
)
LACKING = {"ngram": PADDED, "history": PADDED}  # by drafter
HOSTINGS = {  # by drafter
    "none": Hosting(algorithms=(None,), arguments=lambda decoding, own, folder: {}, wanted=lambda decoding: {}),
    "mtp": Hosting(
        algorithms=("EAGLE", "NEXTN"), arguments=head_arguments, wanted=head_wanted, lengths=("fixed", "entropy")
    ),
    "block": Hosting(
        algorithms=("DFLASH",),
        arguments=dflash.arguments,
        wanted=dflash.wanted,
        sampled=False,
        cpu=False,
        seeded=False,
        measured=False,
        refuse=dflash.refuse_drafter,
    ),
}


def missing(system: System) -> str | None:
    """What SGLang lacks for a system; None if it hosts it, and "" where there is no more to say."""
    if system.serve_error:
        return f"{system.serve_error}; "
    hosting = HOSTINGS.get(system.drafter_name)
    if system.drafter_name in LACKING:
        return LACKING[system.drafter_name]
    if hosting is None or system.rule_name != "rejection" or system.custom_cycle:
        return ""
    if system.length_name not in hosting.lengths:
        return f"{hosting.algorithms[0]} has one number of drafts for all requests of a server; "
    if system.sampled and not hosting.sampled:
        return f"{hosting.algorithms[0]} drafts greedily; "
    return None


HOSTED = [name for name, system in SYSTEMS.items() if missing(system) is None]
