"""Study of whether drafts pay on SmolLM2-135M-Instruct: accept length against the cost of a cycle on this machine."""
