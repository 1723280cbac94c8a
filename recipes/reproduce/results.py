"""All findings by claim and model, each with its verdict: the data behind every page."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from recipes.reproduce.claims import MODELS, REAL_STUDIES, RECIPES, Claim, Paper, heading, model_of
from recipes.reproduce.deciding import DecidingNumber, effect_of
from recipes.reproduce.pages import verdicts
from recipes.reproduce.record import Content, judged, rules_of, substance
from recipes.reproduce.scope import Scope, counted, family, scope_of
from recipes.reproduce.verdicts import Finding, overall

UNTESTED = "not tested"
NONE_YET = "no results yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A finding of a study with its verdict, corrected for all findings of its claim."""

    study: str
    finding: Finding
    verdict: str
    p: float | None  # corrected; None: not tested
    effect: DecidingNumber | None  # None: not measured
    before: str | None  # the verdict by the run's own rule, where a later rule has judged again
    scope: Scope | None  # how it counts, where that differs from its rule

    @property
    def measured(self) -> bool:
        """Return whether the study has measured what the finding is about; a study may be measured in parts."""
        return not (self.finding.untested or "").startswith("not measured")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Findings of all studies; ``contents`` maps each study to its results, None where it has none."""

    contents: Mapping[str, Content | None]
    families: Mapping[tuple[str, str], Sequence[Judged]]  # (model, claim or heading) -> findings

    def of(self, model: str, name: str) -> Sequence[Judged]:
        """Return the findings of a claim or under a heading, on one model."""
        return self.families.get((model, name), ())

    def verdict(self, model: str, claim: Claim) -> str:
        """Return the verdict on a claim (see ``overall``), with ", so far" while studies of the claim have no results.

        Without any finding it is ``NONE_YET`` as long as such a study has not run.
        """
        waiting = any(self.contents.get(s, 0) is None and model_of(s) == model for s in speakers(claim.name))
        if waiting and not self.of(model, claim.name):
            return NONE_YET
        verdict = overall(self._words(model, claim))
        return f"{verdict}, so far" if waiting else verdict

    def counts(self, model: str, claim: Claim) -> str:
        """Return the number of findings per verdict: 6 confirmed, 2 not tested; empty where there are none."""
        words = self._words(model, claim) if self.of(model, claim.name) else []
        return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))

    def models(self, paper: Paper) -> list[str]:
        """Return the models on which a claim of a paper was measured; the built-in model is always included."""
        keys = [*(claim.name for claim in paper.claims), *paper.others]
        measured = {model for model in MODELS if any(one.measured for key in keys for one in self.of(model, key))}
        return [model for model in MODELS if model in measured or model == [*MODELS][-1]]

    def _words(self, model: str, claim: Claim) -> list[str]:
        return [*(one.verdict for one in self.of(model, claim.name)), *(UNTESTED for _ in claim.beyond_reach)]


def gathered(contents: Mapping[str, Content | None]) -> Results:
    """Return all findings of all studies in order, with verdicts corrected within each claim of a model."""
    decided = verdicts(contents)
    families: dict[tuple[str, str], list[Judged]] = {}
    for study, content in contents.items():
        for place, finding in enumerate(judged(content) if content else ()):
            assert content is not None
            verdict, p = decided[study, place]
            one = Judged(
                study=study, finding=counted(study, finding), verdict=verdict, p=p,
                effect=effect_of(study, finding, content), before=_before(finding, content),
                scope=scope_of(study, finding.statement),
            )  # fmt: skip
            families.setdefault(family(study, finding), []).append(one)
    return Results(contents=contents, families=families)


@cache
def speakers(claim: str) -> tuple[str, ...]:
    """Return the studies whose rules test a claim."""
    return tuple(s for s in (*REAL_STUDIES, *RECIPES) if any(heading(s, rule.claim) == claim for rule in rules_of(s)))


def post_hoc(content: Content) -> bool:
    """Return whether the newest judgement, translations aside, was made after the run."""
    return bool(substance(content).get("post_hoc"))


def _before(finding: Finding, content: Content) -> str | None:
    if not post_hoc(content):
        return None
    first = [old for old in content["judgements"][0]["findings"] if old["statement"] == finding.statement]
    return first[0].get("verdict") if first else None
