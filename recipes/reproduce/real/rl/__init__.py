"""Drift of acceptance under GRPO on SmolLM2-135M-Instruct: claim C4, and what the monitor makes of it."""
