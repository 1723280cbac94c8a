"""Scope of findings: how a finding counts where its study's rule says more, or something else, than the paper does.

A rule is written before its run. The run may show that its bar was ours, or that the arms were not in the paper's
regime. The rule, its verdict and its numbers stay as they are stored; this table says how the finding counts. It was
written after the runs, with the findings known. So it only takes findings away from a claim and never confirms or
refutes one. Findings of one kind are treated alike on both models, whichever side they are on.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from recipes.reproduce.claims import heading, model_of, owner
from recipes.reproduce.verdicts import Finding

Kind = Literal["ours", "outside", "further"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """How some findings of some studies count.

    ``ours``: the paper makes no such statement. The finding stands beside the claim, is corrected separately and does
    not count for it. ``outside``: the finding is about the claim, but outside the paper's regime, and does not test the
    claim. ``further``: the paper makes the statement, but not as this claim. It is listed under the paper's further
    findings.
    """

    studies: Sequence[str]
    statements: str  # regular expression to search for in statements
    kind: Kind
    why: str


ON_A_CPU = (
    "decoding on a CPU, where a pass over several tokens costs more than over one, is not its regime; on "
    "SmolLM2 rollouts are .23 of a step, so free rollouts give 1.30 times"
)
TWO_CORES = (
    "a worker and a trainer on a core each, where a pass over several tokens costs more than over one, are not the "
    "paper's regime; that rollouts are the longer part is due to a setting of ours"
)
BY_TOKENS = "the paper's line is over steps of RL; it claims none from token to token"
BY_TEMPERATURE = "over temperatures the paper itself calls sampled drafts stable"
TO_ONE_POSITION = "the paper compares means of tasks, not the share of positions"
FIXED_TEXTS = (
    "the measure is ours: fixed texts of the first policy, read under a later one that hardly writes them any more; "
    "the paper's is Eq. 16"
)

SCOPES = (
    Scope(studies=("real_entropy",), statements="linearly, from token to token", kind="ours", why=BY_TOKENS),
    Scope(
        studies=("real_entropy", "temperature"),
        statements="sampled drafts (of|it) .*over temperatures",
        kind="ours",
        why=BY_TEMPERATURE,
    ),
    Scope(
        studies=("real_regime",),
        statements="a bar of ours",
        kind="ours",
        why="the paper draws a line and gives no bar for how straight it is",
    ),
    Scope(studies=("real_drafts", "boundary"), statements="at most positions", kind="ours", why=TO_ONE_POSITION),
    Scope(
        studies=("real_losses",),
        statements="less with entropy|dependence on entropy",
        kind="outside",
        why="the drafts of cross-entropy show no fall with entropy here (C1) that training could remove",
    ),
    Scope(studies=("budget",), statements="by 0.2 tokens", kind="ours", why="the bar of 0.2 tokens is ours"),
    Scope(
        studies=("real.rl", "drift"),
        statements="direct mismatch|mostly because entropy does",
        kind="ours",
        why=FIXED_TEXTS,
    ),
    Scope(
        studies=("real.rl",),
        statements="One training before RL is enough",
        kind="ours",
        why="the bar of .05 tokens is ours; the paper's Limitations advise co-training where entropy leaves the range "
        "of the training, as it does in both directions here",
    ),
    Scope(
        studies=("real.rl", "drift"),
        statements="by cross-entropy during RL makes it worse",
        kind="further",
        why="the paper's figure 9a, not its claim that drift costs nothing",
    ),
    Scope(
        studies=("real_pays", "real_steps", "throughput"),
        statements="plain decoding|rollouts of a synchronous job|steps of a synchronous job",
        kind="outside",
        why=ON_A_CPU,
    ),
    # The next two were written before the run of async_steps.
    Scope(studies=("async_steps",), statements="asynchronous job (shorter|are shorter)", kind="outside", why=TWO_CORES),
    Scope(
        studies=("async_steps",),
        statements="reaches a reward of .65",
        kind="ours",
        why="the bar of .65 is ours; the paper gives no time to a reward",
    ),
    Scope(
        studies=("pad",),
        statements="a quarter of a token",
        kind="ours",
        why="both bars, a quarter of a token and .05 of utility, are ours; the paper compares with plain decoding and "
        "standard speculative decoding of an 8B target with a .6B draft model",
    ),
    Scope(
        studies=("real_systems",),
        statements="by less than .05|at least 1.7 tokens|flat up to the middle",
        kind="ours",
        why="the bar is ours: .05 of reward, 1.7 tokens a cycle, a third of what is lost at high layers",
    ),
    Scope(
        studies=("blockpilot",),
        statements="best size of each prompt.*tokens per processor time",
        kind="outside",
        why="noise of the same size gives an oracle as large a gain, and neither check of transfer supports this one",
    ),
    Scope(
        studies=("firp",),
        statements="identity or a random matrix",
        kind="ours",
        why="the bar of 1.3 tokens is ours; the paper has no such arm",
    ),
    Scope(
        studies=("pipo",),
        statements="improves on SFT|an equal number of tokens",
        kind="outside",
        why="the paper distils from a stronger teacher; here the teacher is the policy itself, rolled out at tau .5 "
        "and judged with 35 % of the drafts dropped",
    ),
)


def scope_of(study: str, statement: str) -> Scope | None:
    """Return the scope of a study's finding; None: it counts for its claim, as its rule says."""
    found = [one for one in SCOPES if study in one.studies and re.search(one.statements, statement)]
    return found[0] if found else None


def ours(claim: str) -> str:
    """Return the heading of findings on a claim whose bar is ours."""
    return f"{claim}, bars of ours"


def family(study: str, finding: Finding) -> tuple[str, str]:
    """Return the model and the claim or heading whose findings are corrected together, whichever study they come from.

    Rules say "within the claim", and each is about one model. So findings on the built-in model do not change verdicts
    on the real one, or the reverse. A claim that two studies share is not made easier by a split among them.
    """
    claim, scope = heading(study, finding.claim), scope_of(study, finding.statement)
    if scope is not None and scope.kind == "ours":
        claim = ours(claim)
    if scope is not None and scope.kind == "further":
        claim = next(iter(owner(study).others))
    return model_of(study), claim


def counted(study: str, finding: Finding) -> Finding:
    """Return a finding as it counts for its claim: not tested where its arms lie outside the paper's regime."""
    scope = scope_of(study, finding.statement)
    if scope is None or scope.kind != "outside" or finding.untested is not None:
        return finding
    return replace(finding, untested=scope.why)
