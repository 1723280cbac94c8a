"""Whether drafts make the steps of RL on SmolLM2-135M-Instruct shorter: whole jobs with and without, side by side."""
