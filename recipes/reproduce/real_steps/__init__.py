"""Study of whether drafts shorten RL steps on SmolLM2-135M-Instruct: whole jobs with and without, side by side."""
