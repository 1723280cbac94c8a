"""Study of questions that the paper leaves open.

They are estimators, the corrected loss, draft temperature, truncated distributions and cold starts.
"""
