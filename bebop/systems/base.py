"""What a decoding system is: an object that makes its parts, and says what others may want to know of it.

The configuration, the driver and the monitor read systems without torch, so a method imports what needs torch itself.
Methods return classes. Each is called with (policy, slots, config), see ``rollout/decoding/base.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# The class of a drafter, rule, length or cycle: called with (policy, slots, config). The types of these stand on higher
# floors, and the configuration reads this file: naming them here would close a circle of imports.
PartClass = Callable[..., Any]
# What systems count that mix the head's distribution m with others: sum of sum_v min(p, m), over first drafts alone.
HEAD_OVERLAP, HEAD_READ = "head_overlap", "head_read"


@dataclass(frozen=True, slots=True, kw_only=True)
class AuxModel:
    """A trained part that decoding systems need: ``python -m bebop.adapt part=NAME`` makes it.

    The functions import torch, so nothing is called before it is needed.
    """

    name: str
    summary: str  # one line for --help
    job: Callable[[], Any]  # returns the class of its training, see bebop/adaptation/part_job.py
    network: Callable[[], Callable[..., Any]] | None = None  # returns its class; None: it is in the checkpoint
    export: Callable[[], Callable[..., str]] | None = None  # returns what writes it, see bebop/export.py
    options: type | None = None  # settings of its training
    # Where it is also kept in folders of a public layout: returns a class that reads the settings and the weights of
    # one, loads it and writes it, as ``Eagle3Folder`` does.
    folder: Callable[[], Any] | None = None
    backend: Callable[[], Any] | None = None  # where it can be trained beside RL: returns its ``HeadBackend``


@dataclass(frozen=True, kw_only=True)
class System:
    """A decoding system, as all who ask about it know it. ``speculative.py`` has what most systems have in common.

    ``drafter_name``, ``rule_name`` and ``length_name`` stand in traces, in messages and in the tables of other engines.
    """

    name: str
    summary: str  # one line for --help
    drafter_name: str = "none"  # none drafts nothing
    rule_name: str = "rejection"
    length_name: str = "fixed"
    head: bool = False  # drafts with the model's MTP head
    separate: bool = False  # drafts with another causal language model, ``model.draft``
    history: bool = False  # drafts from other completions of the same prompt, which engines are told of
    draft_temperature: float | None = None  # 0: always greedy; None: decoding.draft_temperature, or the target's
    supports_auto_temperature: bool = False  # its drafter can choose the temperature (decoding.draft_temperature=auto)
    draft_tokens: int = 3  # K where it is chosen by its name alone
    tree: bool = False  # drafts are the nodes of a tree: draft_tokens counts them, statistics go by their depth
    width: int = 16  # the most drafts that a cycle may hold
    options: type | None = None  # settings of its own, in options.py of its folder
    sampled: bool = True  # drafts are draws from q, so that acceptance is the overlap of p and q
    other: str | None = None  # the same system with drafts made the other way, sampled or greedy
    exact: bool = True  # the output distribution is the target's
    has_logprobs: bool = False  # it is not, but each token comes with its log-prob under what it was drawn from
    static: bool = False  # a cycle asks nothing of the device and is the same operations whatever is drawn (``Plan``)
    static_verify: bool = False  # its drafting may ask; its target pass, rule and statistics do not
    custom_cycle: bool = False  # it decodes in another way than by drafting for the model and verifying
    train_error: str = ""  # why bebop.run cannot train on its completions, and what can be done; empty: it can
    serve_error: str = ""  # why other engines cannot host it; empty: it is for them to say

    def drafter(self) -> PartClass:
        """Return the class of its drafter; not called for a system that drafts nothing."""
        raise NotImplementedError(f"{self.name} drafts nothing")

    def rule(self) -> PartClass:
        """Return the class of its acceptance rule."""
        raise NotImplementedError

    def length(self) -> PartClass:
        """Return the class that says how many tokens are drafted."""
        raise NotImplementedError

    def auto_length(self) -> PartClass:
        """Return the class behind ``draft_tokens=auto``: as many drafts in all rows as pay."""
        raise NotImplementedError

    def decoder(self) -> PartClass:
        """Return the class of its cycle."""
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
        """Return the parts that co-training trains in the place of the MTP head."""
        return tuple(part.name for part in self.training() if part.backend is not None)

    @property
    def drafts(self) -> bool:
        """Return whether its cycles have drafts, which are accepted or not."""
        return self.drafter_name != "none" or self.custom_cycle

    @property
    def fixed_length(self) -> bool:
        """Return whether a cycle has as many drafts as were asked for, where that is a number."""
        return self.length_name == "fixed"

    @property
    def free_length(self) -> bool:
        """Return whether its cycles may have any number of drafts, the same in all rows, none included."""
        return self.drafts and not self.custom_cycle and not self.tree and not self.history and self.fixed_length

    @property
    def supports_auto_length(self) -> bool:
        """Return whether it takes ``draft_tokens=auto``."""
        return self.free_length

    @property
    def most_drafts(self) -> int:
        """Return the most drafts with ``draft_tokens=auto``, where no setting limits them."""
        return 5

    @property
    def monitored(self) -> bool:
        """Return whether the drift monitor can say why acceptance moves.

        Of drafts from history it moves with what is asked again and how completions repeat, so of those the head alone
        is watched.
        """
        return self.drafts and (self.head or not self.history)
