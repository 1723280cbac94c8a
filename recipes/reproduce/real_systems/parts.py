"""Trained parts of the systems, each from the job behind ``python -m bebop.adapt part=NAME``.

The jobs run in this process, with settings that need no Hydra, so they also run on a borrowed GPU. An existing part is
not trained again. A stopped training resumes from its newest checkpoint, its completions or its swept sizes, and loses
only the work since the last of these.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.adaptation.corpus import begun
from bebop.adaptation.part_job import store
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import from_dict
from bebop.config.job import ModelConfig
from bebop.model.parts import card_of, read_card
from bebop.run_dir.folder import OVERRIDES
from bebop.systems import PARTS as AUX
from bebop.systems.pad.training import PivotAdaptation
from recipes.reproduce.real.plan import agree
from recipes.reproduce.real_systems.plan import OPEN, REWARD, WORD, WORDS, Sizes, questions, write_questions
from recipes.reproduce.real_systems.words import all_words

# The part that a name stands for, the kind of its questions, and the temperature of its completions.
KIND: Mapping[str, tuple[str, str, float]] = {
    "firp": ("firp", "open", OPEN),
    "pivot": ("pivot", "words", WORDS),
    "block": ("block", "open", OPEN),
    "block_length": ("block_length", "open", OPEN),
    "pipo_sft": ("pipo", "word", WORD),
    "pipo_more": ("pipo", "word", WORD),  # SFT that continues for as many steps as distillation takes
    "pipo_opd": ("pipo", "word", WORD),
}
BEGINS_FROM = {"block_length": "block", "pipo_opd": "pipo_sft"}  # parts that another one needs


def part_path(place: Path, name: str) -> Path:
    """Return the path of a trained part's weights."""
    return place / name / f"{KIND[name][0]}.safetensors"


def model_config(place: Path, sizes: Sizes, parts: Sequence[str] = ()) -> ModelConfig:
    """Return the configuration of the model with its own MTP head and the named parts."""
    chosen = {KIND[name][0]: str(part_path(place, name)) for name in parts}
    known = {name: None for name, part in AUX.items() if part.network}
    return ModelConfig(
        path=sizes.model, device=sizes.device, dtype=sizes.dtype, init_mtp=sizes.model != "tiny",  # type: ignore[arg-type]
        parts={**known, **chosen},
    )  # fmt: skip


def settings(place: Path, sizes: Sizes, name: str, resume: bool = False) -> dict[str, Any]:
    """Return the configuration of a part's training as nested settings."""
    part, kind, temperature = KIND[name]
    needed = BEGINS_FROM.get(name)
    model: dict[str, Any] = {"path": sizes.model, "device": sizes.device, "dtype": sizes.dtype}
    # Many requests at a time keep a processor busy: there drafts take work and save no time. PAD needs the head itself.
    model |= {"init_mtp": sizes.model != "tiny" and (kind != "open" or sizes.device != "cpu")}
    if needed is not None:
        model["parts"] = {KIND[needed][0]: str(part_path(place, needed))}
    most = sizes.new[kind]
    return {
        "part": part,
        "model": model,
        "task": {
            "source": "file", "name": kind, "path": str(place / "questions" / f"{kind}.jsonl"), "reward": REWARD,
            "system": None if sizes.model == "tiny" else "auto",
        },
        "data": {
            "sequences": sizes.sequences[part], "slots": sizes.slots, "max_length": 128 + most,
            "sampling": {"temperature": temperature, "max_new_tokens": most},
        },
        "train": {**sizes.train, "cache_mb": sizes.cache_mb},
        "evaluation": {"prompts": sizes.prompts},
        "options": dict(sizes.options[name]),
        "dir": str(place / name),
        "resume": resume,
        "tensorboard": False,
    }  # fmt: skip


def flat(values: Mapping[str, Any], where: str = "") -> list[str]:
    """Return nested settings as command-line overrides: ["data.slots=64", ...]."""
    lines: list[str] = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            lines += flat(value, f"{where}{name}.")
        else:
            lines.append(f"{where}{name}={'null' if value is None else value}")
    return lines


def train_part(place: Path, sizes: Sizes, name: str, progress: bool = True) -> None:
    """Train a part unless it exists, from everything that earlier runs stored."""
    path = part_path(place, name)
    if card_of(path).is_file() and path.is_file():
        return
    write_questions(place / "questions", sizes)
    folder = place / name
    config = from_dict(
        AdaptConfig,
        {**settings(place, sizes, name, begun(folder) or store(folder).newest_sound() is not None),
         "progress": progress},
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OVERRIDES).write_text(json.dumps(flat(settings(place, sizes, name))) + "\n")  # for the card's command
    job = AUX[config.part].job()(config, folder)
    if isinstance(job, PivotAdaptation):
        # Tens of thousands of continuations are judged one by one. The reward is our own code and needs no separate
        # process: a call there takes milliseconds, here microseconds.
        job.reward = lambda text, prompt: all_words(text, prompt.item)
    job.prepare()
    began = time.process_time()
    job.run()
    with (folder / "seconds.jsonl").open("a") as file:  # of this sitting
        file.write(json.dumps({"processor_seconds": time.process_time() - began}) + "\n")


def train_parts(place: Path, sizes: Sizes, names: Sequence[str], progress: Callable[[str], object]) -> None:
    """Train parts in their order; ``progress`` is called with the name of each part that begins.

    Raises:
        UserError: The folder holds parts of other sizes, or a part cannot be trained.
    """
    for name in [name for name in KIND if name in names]:
        plan = {
            "settings": flat(settings(Path(), sizes, name)),
            "questions": len(questions(sizes, False)[KIND[name][1]]),
        }
        agree(place / name / "plan.json", plan, "a part")
        progress(name)
        train_part(place, sizes, name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Trained part: the results of its own report, and its training time."""

    name: str
    results: dict[str, Any]  # from its card, on its own held-out prompts
    hours: float  # of processor time, of the sittings that ended


def trained(place: Path) -> list[Trained]:
    """Return all trained parts."""
    found = []
    for name in KIND:
        path = part_path(place, name)
        if card_of(path).is_file():
            log = place / name / "seconds.jsonl"
            lines = log.read_text().splitlines() if log.is_file() else []
            hours = sum(json.loads(line)["processor_seconds"] for line in lines) / 3600
            found.append(Trained(name=name, results=dict(read_card(path).results), hours=hours))
    return found
