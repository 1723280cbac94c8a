"""Whether drafts pay on SmolLM2-135M-Instruct: accept length against what a cycle costs, measured on this machine."""
