"""What the paper leaves open: estimators, the corrected loss, draft temperature, truncated laws, cold starts."""
