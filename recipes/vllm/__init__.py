"""vLLM as the rollout engine: launch scripts, and a check that a job learns as it does with the embedded engine."""
