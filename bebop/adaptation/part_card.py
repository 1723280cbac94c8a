"""What is written beside a trained part: for which backbone, from what, and the command that makes it again."""

import dataclasses
import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.config_adapt import AdaptConfig
from bebop.model.backbone import Policy
from bebop.model.parts import PartCard, backbone_fingerprint
from bebop.run_folder import OVERRIDES

PLACES = ("dir=", "out=", "resume=")  # settings that say nothing of what is made


def part_card(
    config: AdaptConfig, folder: Path, policy: Policy, settings: Mapping[str, Any], results: Mapping[str, Any]
) -> PartCard:
    """The card of a part that was trained in a run folder; ``settings``: what its network is made with."""
    return PartCard(
        part=config.part,
        settings=dict(settings),
        backbone=backbone_fingerprint(policy),
        data={"task": dataclasses.asdict(config.task), "answers": config.data.sequences},
        seed=config.seed,
        command=command(config, folder),
        results=dict(results),
    )


def command(config: AdaptConfig, folder: Path) -> str:
    """The command line, with the settings that the run was started with."""
    file = folder / OVERRIDES
    given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else [f"part={config.part}"]
    return shlex.join(["python", "-m", "bebop.adapt", *(one for one in given if not one.startswith(PLACES))])
