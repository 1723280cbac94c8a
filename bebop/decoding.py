"""The decoding systems: a row of names and properties each, readable without torch.

A part is found by its module's name: ``drafter="mtp"`` is ``rollout/decoding/drafters/mtp.py``, and so for rules and
lengths. A new system is a row here, and a file for each part that is not there yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from bebop.options import (
    BlockLengthTraining,
    BlockTraining,
    EmaOptions,
    FirpOptions,
    FirpTraining,
    HistoryOptions,
    PadOptions,
    PipoOptions,
    PipoTraining,
    PivotTraining,
    TreeOptions,
)
from bebop.tree_shape import MAX_NODES


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """What a decoding system is made of, and what others may want to know of it."""

    summary: str  # one line for --help
    drafter: str = "none"  # a module of rollout/decoding/drafters; none drafts nothing
    rule: str = "rejection"  # a module of rollout/decoding/rules
    length: str = "fixed"  # a module of rollout/decoding/lengths
    decoder: str = "draft_verify"  # a module of rollout/decoding
    head: bool = False  # drafts with the model's MTP head
    history: bool = False  # drafts from other completions of the same prompt, which engines are told of
    draft_temperature: float | None = None  # 0: always greedy; None: decoding.draft_temperature, or the target's
    self_tempered: bool = False  # its drafter can choose the temperature (decoding.draft_temperature=auto)
    draft_tokens: int = 3  # K where it is chosen by its name alone
    tree: bool = False  # drafts are the nodes of a tree: draft_tokens counts them, statistics go by their depth
    width: int = 16  # the most drafts that a cycle may hold
    needs: tuple[str, ...] = ()  # trained parts, rows of PARTS
    options: type | None = None  # settings of its own, in bebop/options.py
    sampled: bool = True  # drafts are draws from q, so that acceptance is the overlap of p and q
    other: str | None = None  # the same system with drafts made the other way, sampled or greedy
    exact: bool = True  # the output distribution is the target's
    weighable: bool = False  # it is not, but each token comes with its log-prob under what it was drawn from
    untrainable: str = ""  # why bebop.run cannot train on its completions, and what can be done; empty: it can
    unserved: str = ""  # why other engines cannot host it; empty: it is for them to say

    @property
    def drafts(self) -> bool:
        """Whether its cycles have drafts, which are kept or not."""
        return self.drafter != "none" or self.own_cycle

    @property
    def free_length(self) -> bool:
        """Whether its cycles may have any number of drafts, the same in all rows, none included."""
        return self.drafts and not self.own_cycle and not self.tree and not self.history and self.length == "fixed"

    @property
    def auto(self) -> str | None:
        """The module of lengths behind draft_tokens=auto: as many drafts in all rows, or in each as many as pay."""
        if self.history:
            return "row_cost"
        return "cost" if self.free_length else None

    @property
    def most_drafts(self) -> int:
        """With draft_tokens=auto, where nobody says how many: history may be sure of many tokens."""
        return self.draft_tokens if self.history else 5

    @property
    def watched(self) -> bool:
        """Whether the drift monitor can say why acceptance moves: of drafts from history it moves with what is asked
        again and how completions repeat, so of those the head alone is watched."""
        return self.drafts and (self.head or not self.history)

    @property
    def own_cycle(self) -> bool:
        """Whether it decodes in another way than by drafting for the model and verifying."""
        return self.decoder != "draft_verify"


# What systems count that mix the head's distribution m with others: sum of sum_v min(p, m), over first drafts alone.
HEAD_OVERLAP, HEAD_READ = "head_overlap", "head_read"
MIXED = "its drafts are drawn from a mixture of history and MTP head, which the embedded engine alone computes"
WITHIN = "its drafts come out of the target's own passes, between whose layers positions of its own enter"

SYSTEMS = {
    "autoregressive": System(summary="plain decoding, one token per pass"),
    "target_only": System(
        summary="greedy MTP drafts, accepted with p(argmax q)",
        drafter="mtp",
        head=True,
        draft_temperature=0.0,
        sampled=False,
        other="bebop",
    ),
    "bebop": System(
        summary="sampled MTP drafts, accepted with the overlap of draft and target",
        drafter="mtp",
        head=True,
        self_tempered=True,
        other="target_only",
    ),
    "bebop_adaptive": System(
        summary="bebop, drafting on only while the draft's entropy makes it pay",
        drafter="mtp",
        length="entropy",
        head=True,
        self_tempered=True,
        draft_tokens=5,
    ),
    "ngram": System(summary="drafts looked up in the context", drafter="ngram", sampled=False),
    "history": System(
        summary="drafts sampled from what followed the same words in other completions of the prompt",
        drafter="history",
        history=True,
        draft_tokens=16,
        options=HistoryOptions,
    ),
    "bebop_history": System(
        summary="drafts sampled from a mixture of history and MTP head, weighted by how far history was right",
        drafter="history_mtp",
        head=True,
        history=True,
        draft_tokens=16,
        options=HistoryOptions,
        unserved=MIXED,
    ),
    "bebop_block": System(
        summary="bebop, the drafts of a cycle verified as a whole",
        drafter="mtp",
        rule="block",
        head=True,
        self_tempered=True,
    ),
    "bebop_tree": System(
        summary="bebop, several drafts for a place: a tree, of which the accepted path is kept",
        drafter="mtp_tree",
        rule="tree_walk",
        head=True,
        draft_tokens=7,
        tree=True,
        width=MAX_NODES,
        options=TreeOptions,
    ),
    "pad": System(
        summary="bebop, rejected drafts accepted where a classifier finds that they do not matter",
        drafter="mtp",
        rule="pivot_override",
        head=True,
        self_tempered=True,
        needs=("pivot",),
        options=PadOptions,
        exact=False,
        weighable=True,
    ),
    "block": System(
        summary="drafts of a whole block in one pass, sampled, accepted with the overlap of draft and target",
        drafter="block",
        needs=("block",),
        draft_tokens=7,
        other="block_target_only",
    ),
    "block_target_only": System(
        summary="drafts of a whole block in one pass, greedy, accepted with p(argmax q)",
        drafter="block",
        needs=("block",),
        draft_temperature=0.0,
        draft_tokens=7,
        sampled=False,
        other="block",
    ),
    "blockpilot": System(
        summary="block, of a size that is chosen for each request from its prompt",
        drafter="block",
        length="block_length",
        needs=("block", "block_length"),
        draft_tokens=9,
    ),
    "block_ema": System(
        summary="block, of a size that is chosen for each cycle from what was accepted lately",
        drafter="block",
        length="ema",
        needs=("block",),
        options=EmaOptions,
        draft_tokens=9,
    ),
    "firp": System(
        summary="a tree of drafts from hidden states of future tokens, made within the target's own passes",
        drafter="firp",
        rule="tree_walk",
        needs=("firp",),
        draft_tokens=16,
        tree=True,
        width=MAX_NODES,
        options=FirpOptions,
        unserved=WITHIN,
    ),
    "firp_chain": System(
        summary="drafts from hidden states of future tokens, made within the target's own passes",
        drafter="firp",
        needs=("firp",),
        unserved=WITHIN,
    ),
    "pipo": System(
        summary="pairs of tokens in and out, by a network of its own; a second token stands where a head trusts it",
        decoder="pipo",
        needs=("pipo",),
        draft_tokens=1,
        width=1,
        options=PipoOptions,
        sampled=False,
        exact=False,
        untrainable="completions drawn in pairs cannot be scored again token by token, nor would that train the "
        "network that drew them: python -m bebop.adapt part=pipo options.stage=opd trains it on its own completions",
        unserved="its caches hold an entry for two tokens, its passes end in a gate, and its network is in no "
        "checkpoint",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Something that decoding systems need trained: ``python -m bebop.adapt part=NAME`` makes it."""

    summary: str  # one line for --help
    trainer: str  # the module of its training
    model: str = ""  # a module of bebop/model, its network; none for the head, which is in the checkpoint
    export: str = ""  # a module of bebop/model that writes it as another program loads it, see bebop/export.py
    options: type | None = None  # settings of its training, in bebop/options.py


PARTS: Mapping[str, Part] = {
    "head": Part(summary="the MTP head of the checkpoint", trainer="bebop.adaptation.job"),
    "pivot": Part(
        summary="which rejected drafts matter", trainer="bebop.adaptation.pivot", model="pivot", options=PivotTraining
    ),
    "block": Part(
        summary="a drafter of whole blocks",
        model="block",
        export="dflash",
        trainer="bebop.trainer.block",
        options=BlockTraining,
    ),
    "block_length": Part(
        summary="the choice of a block size from a prompt",
        model="block_length",
        trainer="bebop.trainer.block_length",
        options=BlockLengthTraining,
    ),
    "firp": Part(
        summary="hidden states of future tokens, made between the target's layers",
        model="firp",
        trainer="bebop.trainer.firp",
        options=FirpTraining,
    ),
    "pipo": Part(
        summary="a network that reads and writes pairs of tokens",
        model="pipo",
        trainer="bebop.trainer.pipo",
        options=PipoTraining,
    ),
}
