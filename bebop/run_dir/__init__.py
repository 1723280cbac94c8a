"""Run folders: checkpoints, identity of a run's inputs, and the check of who may resume a run."""
