"""Define the settings of decoding: the dataclass behind ``decoding=SYSTEM``."""

import math
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from bebop.config.fields import NOT_NEGATIVE, Limit, Settings, check, parse_options, setting
from bebop.systems import SYSTEMS

T = TypeVar("T")
SYSTEM = Limit(lambda name: name in SYSTEMS, "choose one of " + ", ".join(SYSTEMS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Time in units of one plain decoding step (SPEC 0.8, 1.7)."""

    draft: float  # one draft step
    verify: float = 0.0  # one more verified position


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingConfig(Settings):
    """How tokens are drafted and verified."""

    SECTION = "decoding."
    system: str = setting("bebop", "a decoding system, see bebop/systems", SYSTEM)
    draft_tokens: int | Literal["auto"] = setting(
        3,
        "K, drafts per cycle; 0 for a system without drafts alone; auto: in every cycle as many as give most tokens a "
        "second, 0 to most_drafts; of drafts from history so many in every row by itself. They depend on measured "
        "time, so completions are not a function of seeds: a job that is resumed or run again has others, of the same "
        "distribution",
        Limit(lambda k: k == "auto" or k >= 0, "give 0 or more, or auto"),
    )
    most_drafts: int | None = setting(
        None,
        "draft_tokens=auto: the most drafts of a row in a cycle; null: 5, or 16 of a system that drafts from history",
        Limit(lambda k: k is None or k >= 1, "give 1 or more, or null"),
    )
    draft_temperature: float | Literal["auto"] | None = setting(
        None,
        "of the drafts; null: the target's; auto: what would have been accepted most, by position and request",
        Limit(lambda t: t in ("auto", 0) or 1e-4 <= t < math.inf, "give 0 (greedy), 0.0001 or more, auto, or null"),
    )
    cost_ratio: float = setting(0.15, "adaptive length: time of a draft step over that of a plain step", NOT_NEGATIVE)
    verify_ratio: float = setting(0.05, "adaptive length: the same of one more verified position", NOT_NEGATIVE)
    options: dict[str, Any] = setting(dict, "NAME=VALUE: what the system has alone")

    def _validate(self) -> None:
        system, chosen = SYSTEMS[self.system], f"with decoding.system={self.system}"
        options = parse_options(system.options, self.options, "decoding.options.", f"decoding.system={self.system}")
        most = min(system.width, getattr(options, "most_drafts", system.width))
        given = "most_drafts" if self.draft_tokens == "auto" else "draft_tokens"
        possible = int(system.drafts) <= self.limit <= most
        check(
            possible,
            f"decoding.{given}",
            self.limit,
            f"give 1 to {most} {chosen}{' and its shape' * (most < system.width)}",
        )
        free = ", ".join(name for name, row in SYSTEMS.items() if row.supports_auto_length)
        possible = self.draft_tokens != "auto" or system.supports_auto_length or not system.drafts
        self.require(possible, "draft_tokens", f"give a number {chosen}; auto is for {free}")
        able = system.supports_auto_temperature or not (system.drafts and system.sampled)
        others = ", ".join(name for name, row in SYSTEMS.items() if row.supports_auto_temperature)
        possible = able or self.draft_temperature != "auto"
        self.require(possible, "draft_temperature", f"give a number or null {chosen}; auto is for {others}")

    def of(self, cls: type[T]) -> T:
        """Return the system's own options, as the dataclass that its row names."""
        options = parse_options(cls, self.options, "decoding.options.", f"decoding.system={self.system}")
        assert isinstance(options, cls)
        return options

    @property
    def limit(self) -> int:
        """Return the largest number of drafts in a cycle."""
        if self.draft_tokens != "auto":
            return self.draft_tokens
        return SYSTEMS[self.system].most_drafts if self.most_drafts is None else self.most_drafts

    @property
    def timed(self) -> bool:
        """Return whether the number of drafts depends on the measured time of cycles."""
        return self.draft_tokens == "auto" and SYSTEMS[self.system].supports_auto_length

    @property
    def static(self) -> bool:
        """Return whether the shapes of a cycle do not depend on what its rows draft, nor on measured time."""
        return SYSTEMS[self.system].static and not (self.timed or self.chooses_temperature)

    @property
    def costs(self) -> Costs:
        """Return the configured costs, for an engine that measures none."""
        return Costs(draft=self.cost_ratio, verify=self.verify_ratio)

    @property
    def tree(self) -> bool:
        """Return whether drafts are the nodes of a tree."""
        return SYSTEMS[self.system].tree

    @property
    def depth(self) -> int:
        """Return how many drafts may follow one another in a cycle: K, or the depth of a tree of K nodes."""
        if not self.tree:
            return self.limit
        options = parse_options(SYSTEMS[self.system].options, self.options, "decoding.options.", "")
        return max(map(len, options.paths(self.limit)))

    @property
    def temperature_of_drafts(self) -> float | None:
        """Return the temperature of drafts, 0 for greedy ones; None: the target's, or one near it (``auto``)."""
        own = SYSTEMS[self.system].draft_temperature
        given = None if self.draft_temperature == "auto" else self.draft_temperature
        return given if own is None else own

    @property
    def chooses_temperature(self) -> bool:
        """Return whether the engine chooses the temperature of drafts by their acceptance."""
        return SYSTEMS[self.system].supports_auto_temperature and self.draft_temperature == "auto"
