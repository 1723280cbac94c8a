"""All faults, by area."""

from tests.mutants.tables import (
    certify_live,
    distributions,
    draft_losses,
    engine,
    firp,
    firp_training,
    monitor,
    pipo,
    pipo_training,
    pivot,
    policy,
    resume,
    sampling,
    staleness,
    threads,
    trees,
    watching,
    weights,
)

FAULTS = (
    *sampling.FAULTS,
    *distributions.FAULTS,
    *engine.FAULTS,
    *draft_losses.FAULTS,
    *policy.FAULTS,
    *weights.FAULTS,
    *pivot.FAULTS,
    *trees.FAULTS,
    *firp.FAULTS,
    *firp_training.FAULTS,
    *pipo.FAULTS,
    *pipo_training.FAULTS,
    *staleness.FAULTS,
    *threads.FAULTS,
    *resume.FAULTS,
    *monitor.FAULTS,
    *watching.FAULTS,
    *certify_live.FAULTS,
)
assert len({f.name for f in FAULTS}) == len(FAULTS), "two faults of one name"
