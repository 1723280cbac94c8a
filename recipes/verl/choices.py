"""Choices added to verl's own: a rollout engine, and a weight transfer for machines without NCCL."""

import importlib
from types import ModuleType

NAME = "bebop"


def add_adapter(base: ModuleType) -> None:
    """Add the training worker's side of ``rollout.name=bebop``: verl looks the class up by its path."""
    base._ROLLOUT_REGISTRY[NAME, "async"] = "bebop.verl_job.rollout.EmbeddedAdapter"


def add_replica(replica: ModuleType) -> None:
    """Add the server of ``rollout.name=bebop``."""
    load = "bebop.verl_job.rollout"
    replica.RolloutReplicaRegistry.register(NAME, lambda: importlib.import_module(load).EmbeddedReplica)


def add_transfer(base: ModuleType) -> None:
    """Add ``rollout.checkpoint_engine.backend=bebop``: the imported module registers its class.

    If that module itself caused the import of ``base``, in a process that starts with it, its class does not exist yet.
    """
    importlib.import_module("bebop.verl_job.transfer")
