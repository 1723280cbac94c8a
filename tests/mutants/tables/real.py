"""Faults in the study on a real model, and in what it asks of head training."""

from tests.mutants.fault import fault

CHAINS, HEADS = "trainer/test_chains.py", "trainer/test_heads.py"

FAULTS = (
    fault("real/chains-always-the-same", "trainer/chains.py", "% every == first)", "% every == 0)", CHAINS),
    fault(
        "real/chains-of-all-rows-alike",
        "trainer/chains.py",
        "(rows.token_ids.sum(1, keepdim=True) + random.Random(seed).randrange(every)) % every",
        "torch.full_like(rows.steps[:, :1], random.Random(seed).randrange(every))",
        CHAINS,
    ),
    fault(
        "real/mean-over-all-chains",
        "trainer/heads.py",
        "spaced(chain_rows(rows, self.config.depth), every, self.version).count",
        "chain_rows(rows, self.config.depth).count",
        HEADS,
    ),
)
