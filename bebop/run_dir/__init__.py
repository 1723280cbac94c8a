"""Run folders: checkpoints, identity of what a run began with, and who may resume it."""
