"""Interface of a decoding system: an object that creates its parts and describes its properties.

The configuration, the driver and the monitor read systems without torch, so a method imports what needs torch itself.
Methods return classes. Each is called with (policy, slots, config), see ``rollout/decoding/base.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The class of a drafter, rule, length or cycle: called with (policy, slots, config). Their types belong to higher
# layers, and the configuration reads this file: naming them here would create a circular import.
PartClass = Callable[..., Any]
# Counters of systems that mix the head's distribution m with others: sum of sum_v min(p, m), over first drafts only.
HEAD_OVERLAP, HEAD_READ = "head_overlap", "head_read"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxModel:
    """Trained part that decoding systems need; ``python -m bebop.adapt part=NAME`` trains it.

    The functions import torch, so they are called only when needed.
    """

    name: str
    summary: str  # one line for --help
    job: Callable[[], Any]  # returns the class of its training, see bebop/adaptation/part_job.py
    network: Callable[[], Callable[..., Any]] | None = None  # returns its class; None: it is in the checkpoint
    export: Callable[[], Callable[..., str]] | None = None  # returns what writes it, see bebop/export.py
    options: type | None = None  # settings of its training
    # For a part that may also come in a folder of a public layout: returns a class that reads its settings and weights,
    # loads it and writes it, as ``Eagle3Folder`` does.
    folder: Callable[[], Any] | None = None
    backend: Callable[[], Any] | None = None  # where it can be trained beside RL: returns its ``HeadBackend``


@dataclass(frozen=True, kw_only=True)
class System:
    """Decoding system as seen by its users. ``speculative.py`` holds what most systems have in common.

    ``drafter_name``, ``rule_name`` and ``length_name`` appear in traces, in messages and in the tables of other
    engines.
    """

    name: str
    summary: str  # one line for --help
    drafter_name: str = "none"  # "none": the system drafts nothing
    rule_name: str = "rejection"
    length_name: str = "fixed"
    head: bool = False  # drafts with the model's MTP head
    separate: bool = False  # drafts with another causal language model, ``model.draft``
    history: bool = False  # drafts from other completions of the same prompt, which engines receive
    draft_temperature: float | None = None  # 0: always greedy; None: decoding.draft_temperature, or the target's
    supports_auto_temperature: bool = False  # its drafter can choose the temperature (decoding.draft_temperature=auto)
    draft_tokens: int = 3  # default K
    tree: bool = False  # drafts are the nodes of a tree: draft_tokens counts them, statistics go by their depth
    width: int = 16  # the most drafts that a cycle may hold
    options: type | None = None  # class of its own settings, in options.py of its folder
    sampled: bool = True  # drafts are draws from q, so that acceptance is the overlap of p and q
    other: str | None = None  # name of the same system with greedy instead of sampled drafts, or the reverse
    exact: bool = True  # the output distribution is the target's
    has_logprobs: bool = False  # not exact, but each token comes with its log-prob under the sampled distribution
    static: bool = False  # a cycle never waits for the device and always runs the same operations (``Plan``)
    static_verify: bool = False  # the same for target pass, rule and statistics; drafting may wait
    custom_cycle: bool = False  # decodes with a cycle of its own instead of drafting and verifying
    train_error: str = ""  # why bebop.run cannot train on its completions, and the remedy; empty: it can
    serve_error: str = ""  # why other engines cannot host it; empty: they decide

    def drafter(self) -> PartClass:
        """Return the class of its drafter; never called for a system without drafts."""
        raise NotImplementedError(f"{self.name} drafts nothing")

    def rule(self) -> PartClass:
        """Return the class of its acceptance rule."""
        raise NotImplementedError

    def length(self) -> PartClass:
        """Return the class that decides the number of drafts."""
        raise NotImplementedError

    def auto_length(self) -> PartClass:
        """Return the class behind ``draft_tokens=auto``: as many drafts in all rows as pay off."""
        raise NotImplementedError

    def decoder(self) -> PartClass:
        """Return the class of its decoding cycle."""
        raise NotImplementedError

    def training(self) -> tuple[AuxModel, ...]:
        """Return the trained parts that it needs."""
        return ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the names of the trained parts that it needs."""
        return tuple(part.name for part in self.training())

    @property
    def trained_beside(self) -> tuple[str, ...]:
        """Return the parts that co-training trains instead of the MTP head."""
        return tuple(part.name for part in self.training() if part.backend is not None)

    @property
    def drafts(self) -> bool:
        """Return whether its cycles have drafts, which may be accepted or rejected."""
        return self.drafter_name != "none" or self.custom_cycle

    @property
    def fixed_length(self) -> bool:
        """Return whether a cycle has exactly the configured number of drafts, if that is a number."""
        return self.length_name == "fixed"

    @property
    def free_length(self) -> bool:
        """Return whether its cycles may have any number of drafts, the same in all rows, including none."""
        return self.drafts and not self.custom_cycle and not self.tree and not self.history and self.fixed_length

    @property
    def supports_auto_length(self) -> bool:
        """Return whether it supports ``draft_tokens=auto``."""
        return self.free_length

    @property
    def most_drafts(self) -> int:
        """Return the maximum number of drafts with ``draft_tokens=auto``, if no setting limits them."""
        return 5

    @property
    def monitored(self) -> bool:
        """Return whether the drift monitor can explain changes of its acceptance.

        The acceptance of drafts from history changes with repeated questions and with how completions repeat. So for
        such systems the monitor only watches the head.
        """
        return self.drafts and (self.head or not self.history)
