"""What was found, as an object, as JSON and as an exit code."""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bebop.certify.causes import Cause
from bebop.certify.evidence import Evidence, Visible
from bebop.command import writing
from bebop.store import write_text

Verdict = Literal["pass", "fail", "inconclusive"]
EXIT_CODES: Mapping[Verdict, int] = {"pass": 0, "fail": 1, "inconclusive": 3}  # 2 is a mistake of the user's
FILE = "certificate.json"
FORMAT = 1


class NotCertified(AssertionError):
    """Raised by ``require_pass``; its text is the certificate's sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A position that told much, with what was written before it."""

    request: int
    position: int
    token: str
    context: str  # the end of prompt and answer before it
    gain: float  # what it added to ln E of the winning direction


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingResult:
    """What was found at one setting of the sampling parameters."""

    name: str  # as asked, stress
    sampling: dict[str, Any]
    weight: float  # of its evidence in the whole
    answers: int
    unfinished: int  # answers that did not end, which count like the others
    tokens: int
    log_e: float
    history: tuple[tuple[int, float], ...]  # tokens, ln E
    evidence: tuple[Evidence, ...]
    visible: tuple[Visible, ...] = ()
    untested: dict[str, str] = field(default_factory=dict)  # direction -> why not
    places: tuple[Place, ...] = ()
    acceptance: float | None = None  # drafts accepted over drafts tested

    @property
    def bound(self) -> float | None:
        """Largest upper bound of the total variation per token over all directions; None: nothing is bounded."""
        bounds = [one.tv for one in self.evidence if one.tv is not None]
        return max(bounds, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """Whether a live engine samples from the distribution that it claims, as far as so many tokens can tell."""

    verdict: Verdict
    sentence: str  # what was found
    advice: str  # what to do about it
    log_e: float  # evidence against the claim, all of it merged: ln of an e-value
    alpha: float
    limit_tv: float
    engine: dict[str, Any]
    reference: dict[str, Any]
    settings: tuple[SettingResult, ...]
    white_box: tuple[Evidence, ...] = ()
    white_box_weight: float = 0.0
    cause: Cause | None = None
    structure: tuple[str, ...] = ()  # what no sampler may do: a sentence each
    logprobs: dict[str, Any] = field(default_factory=dict)  # reported ones: mode, tolerance, largest distance
    seeds: dict[str, Any] = field(default_factory=dict)
    not_tested: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    made: dict[str, Any] = field(default_factory=dict)  # versions of what made it

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 3 inconclusive."""
        return EXIT_CODES[self.verdict]

    @property
    def tokens(self) -> int:
        """Tokens at all settings."""
        return sum(one.tokens for one in self.settings)

    @property
    def bound(self) -> float | None:
        """Largest total variation a token that no setting excludes."""
        bounds = [one.bound for one in self.settings]
        known = [bound for bound in bounds if bound is not None]
        return max(known) if known and len(known) == len(bounds) else None

    def require_pass(self) -> "Certificate":
        """Itself; ``NotCertified`` unless the verdict is ``pass``: one line of another project's tests."""
        if self.verdict != "pass":
            raise NotCertified(f"{self.sentence} {self.advice}")
        return self

    def to_json(self) -> str:
        """As ``certificate.json``; what JSON does not have (an infinite e-value) is null."""
        content = {"format": FORMAT, **_finite(dataclasses.asdict(self))}
        return json.dumps(content, indent=1, allow_nan=False) + "\n"

    def write(self, folder: Path) -> Path:
        """``certificate.json`` in a folder that exists; where it is."""
        path = folder / FILE
        with writing(path):
            write_text(path, self.to_json())
        return path


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value
