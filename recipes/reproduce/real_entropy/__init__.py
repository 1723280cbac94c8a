"""Acceptance against entropy on SmolLM2-135M-Instruct: claim C1, and how the draft's entropy follows the target's."""
