"""What is written beside a trained part: for which backbone, from what, and the command that makes it again."""

import dataclasses
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from bebop.config_adapt import AdaptConfig
from bebop.model.backbone import Policy
from bebop.model.parts import PartCard, backbone_fingerprint

# Settings that say where a run goes and how it looks, not what comes out.
PLACES = ("dir", "out", "resume", "progress", "tensorboard")


def part_card(config: AdaptConfig, policy: Policy, settings: Mapping[str, Any], results: Mapping[str, Any]) -> PartCard:
    """The card of a part that was trained with a configuration; ``settings``: what its network is made with."""
    return PartCard(
        part=config.part,
        settings=dict(settings),
        backbone=backbone_fingerprint(policy),
        data={"task": dataclasses.asdict(config.task), "answers": config.data.sequences},
        seed=config.seed,
        command=command(config),
        results=dict(results),
    )


def command(config: AdaptConfig) -> str:
    """The command line with every setting that is not a default."""
    given, usual = (dict(_flat(dataclasses.asdict(c))) for c in (config, AdaptConfig()))
    changed = {name: value for name, value in given.items() if usual.get(name) != value and name not in PLACES}
    # What a part's training has alone is not in Hydra's tree of settings: it has to be added.
    adding = {name: "++" if name.startswith("options.") else "" for name in changed}
    settings = (f"{adding[name]}{name}={value}" for name, value in changed.items())
    return shlex.join(["python", "-m", "bebop.adapt", *settings])


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings by their dotted names."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
