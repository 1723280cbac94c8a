"""Study of acceptance drift under GRPO on SmolLM2-135M-Instruct: claim C4, and the verdicts of the monitor."""
