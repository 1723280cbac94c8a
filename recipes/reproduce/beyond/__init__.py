"""What the paper leaves open: estimators, the corrected loss, draft temperature, truncated distributions, cold
starts."""
