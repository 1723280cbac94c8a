"""Acceptance monitor: records, estimates, decomposition of changes, controller and certificate."""
