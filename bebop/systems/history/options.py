"""Options of drafts from history."""

from dataclasses import dataclass

from bebop.config.fields import (
    POSITIVE,
    SystemOptions,
    setting,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryOptions(SystemOptions):
    """Options of drafts from history: which other completions of a prompt count."""

    tokens: int = setting(1 << 18, "tokens of completions that each worker keeps ready to be matched", POSITIVE)
    past_tokens: int = setting(
        1 << 24,
        "tokens of past completions that the driver keeps, 4 bytes each: all of two epochs, or few of them serve",
        POSITIVE,
    )
    completions: int = setting(16, "past completions of a prompt that count, the newest", POSITIVE)
    siblings: bool = setting(
        True,
        "completions in progress count, too: which tokens come, not their distribution, depends on those beside them",
    )
