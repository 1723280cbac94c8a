"""Faults in the study of losses on a real model: its rules, and which heads it trains and looks at."""

from tests.mutants.fault import fault

REAL = "recipes/reproduce/real"
FINDINGS = "recipes/reproduce/real_losses/findings.py"
RULES = "recipes/reproduce/test_real_losses_rules.py"
PLAN = "recipes/reproduce/test_real_plan.py"

FAULTS = (
    fault("real_losses/two-flat-curves-of-three", FINDINGS, "CONVERGED = 0.99", "CONVERGED = 0.5", RULES),
    fault("real_losses/no-noise", FINDINGS, "kind=kind, arms=arms)", "kind=kind)", RULES),
    fault(
        "real_losses/converged-heads-of-one-arm",
        FINDINGS,
        "for h in heads\n",
        "for h in heads[:1]\n",
        RULES,
    ),
    fault("real_losses/slower-is-faster", FINDINGS, 'kind="below")\n', 'kind="above")\n', RULES),
    fault(
        "real_losses/last-mark-alone",
        FINDINGS,
        "any_of=(parts,),\n        needs=tuple(",
        "any_of=(parts[1:],),\n        needs=tuple(",
        RULES,
    ),
    fault("real_losses/flat-before-the-last-mark", f"{REAL}/runs.py", '"drops": 1', '"drops": 0', PLAN),
    fault("real_losses/short-runs-count-as-flat", f"{REAL}/runs.py", "2 * LAST", "LAST", PLAN),
    fault(
        "real_losses/marks-on-unseen-kinds",
        "recipes/reproduce/real/evaluation.py",
        "if path.name == BEST and",
        "if",
        PLAN,
    ),
)
