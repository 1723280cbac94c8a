"""vLLM as the rollout engine: launch scripts, and whether a job learns with it as it does with the embedded engine."""
