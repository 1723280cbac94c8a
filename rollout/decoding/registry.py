"""Parts of decoding systems, found by the names of their modules (see ``bebop.decoding``)."""

from importlib import import_module
from typing import Any

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.slots import Slots


def make_part(module: str, policy: Policy, slots: Slots, config: DecodingConfig) -> Any:
    """The ``EntryClass`` of a module of this package, such as ``rules.block``."""
    return import_module(f"bebop.rollout.decoding.{module}").EntryClass(policy, slots, config)
