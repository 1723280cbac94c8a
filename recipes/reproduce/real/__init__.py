"""The paper's claims on SmolLM2-135M-Instruct: corpus, states, heads, and how they draft on held-out text."""
