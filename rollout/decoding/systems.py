"""The registry of decoding systems: one entry each, chosen by name."""

from collections.abc import Callable

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.rollout.decoding.drafters import MTPDrafter
from bebop.rollout.decoding.lengths import EntropyLength, FixedLength
from bebop.rollout.decoding.protocols import System
from bebop.rollout.decoding.rules import Plain, Rejection


def autoregressive(config: DecodingConfig) -> System:
    """One token per pass of the backbone."""
    return System(
        name="autoregressive",
        summary="plain decoding, one token per pass",
        drafter=None,
        rule=Plain(),
        drafts=0,
        length=lambda slots: FixedLength(0),
    )


def target_only(config: DecodingConfig) -> System:
    """Greedy MTP drafts, accepted with p(argmax q)."""
    return System(
        name="target_only",
        summary="greedy MTP drafts, accepted with p(argmax q)",
        drafter=MTPDrafter(temperature=0.0),
        rule=Rejection(),
        drafts=config.draft_tokens,
        length=lambda slots: FixedLength(config.draft_tokens),
    )


def bebop(config: DecodingConfig) -> System:
    """Sampled MTP drafts and rejection sampling, accepted with the full overlap of p and q."""
    return System(
        name="bebop",
        summary="sampled MTP drafts, accepted with the overlap of draft and target",
        drafter=MTPDrafter(temperature=config.draft_temperature),
        rule=Rejection(),
        drafts=config.draft_tokens,
        length=lambda slots: FixedLength(config.draft_tokens),
    )


def bebop_adaptive(config: DecodingConfig) -> System:
    """Bebop with a draft length that follows the entropy of the draft."""
    return System(
        name="bebop_adaptive",
        summary="bebop, drafting on only while the draft's entropy makes it pay",
        drafter=MTPDrafter(temperature=config.draft_temperature),
        rule=Rejection(),
        drafts=config.draft_tokens,
        length=lambda slots: EntropyLength(slots, config.draft_tokens, config.cost_ratio, config.verify_ratio),
    )


SYSTEMS: dict[str, Callable[[DecodingConfig], System]] = {
    "autoregressive": autoregressive,
    "target_only": target_only,
    "bebop": bebop,
    "bebop_adaptive": bebop_adaptive,
}


def make_system(config: DecodingConfig) -> System:
    """The system that a configuration names."""
    if config.system not in SYSTEMS:
        raise UserError(f"decoding.system={config.system!r} is not possible: choose one of {', '.join(SYSTEMS)}")
    if config.system != "autoregressive" and config.draft_tokens < 1:
        raise UserError(
            f"decoding.draft_tokens={config.draft_tokens} is not possible with decoding.system={config.system}: "
            "give 1 or more, or choose autoregressive"
        )
    return SYSTEMS[config.system](config)
