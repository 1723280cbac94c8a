"""Study of the paper's claims on SmolLM2-135M-Instruct: corpus, hidden states, heads, drafting on held-out text."""
