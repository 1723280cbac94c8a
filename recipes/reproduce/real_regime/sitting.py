"""One sitting of a form: as many shards as the time allows, then an evaluation of all heads as they stand."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bebop.bench import record
from bebop.model.backbone import Policy
from recipes.reproduce.real.prompts import RealPrompt
from recipes.reproduce.real_regime.evaluation import Archive, look, texts, wanted
from recipes.reproduce.real_regime.plan import TEMPERATURES, TRAINED_AT, Form
from recipes.reproduce.real_regime.rollouts import kept_shard, kept_states, make_engine, shard_path
from recipes.reproduce.real_regime.training import Share, Stream

PROGRESS = "progress.json"


@dataclass(slots=True)
class Progress:
    """What a sitting says of itself, in a file that is written anew with each row."""

    path: Path
    form: Form
    place: dict[str, object]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def keep(self, row: dict[str, Any]) -> None:
        """Add a row, and write the file."""
        self.rows.append(row)
        content = {
            "form": self.form.name, "planned tokens": self.form.tokens, "trained at": TRAINED_AT,
            "temperatures": TEMPERATURES, "place": self.place, "rows": self.rows,
        }  # fmt: skip
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".new")
        scratch.write_text(json.dumps(content, indent=1) + "\n")
        scratch.replace(self.path)


def looks_path(place: Path, shards: int) -> Path:
    """Return the file of the evaluation after so many shards."""
    return place / f"looks-{shards:04d}.zip"


def newest_looks(place: Path) -> Path | None:
    """Return the file of the newest evaluation; None where there is none."""
    found = sorted(place.glob("looks-*.zip"))
    return found[-1] if found else None


def carried_out(form: Form, model: Policy, prompts: Sequence[RealPrompt], place: Path, seconds: float | None) -> Path:
    """Train until the planned tokens are reached or the time is over, evaluate, and return the file of the looks.

    ``seconds``: of the whole sitting; None has no bound. At least one shard is trained on in a sitting, and the
    evaluation is finished whatever it takes: ``Form.reserve`` is kept for it.
    """
    began = time.monotonic()
    progress = _progress(form, place / PROGRESS)
    engine = make_engine(form, model)
    material = texts(form, engine, prompts, place)
    progress.keep({
        "texts": [
            {"temperature": t, "split": split, "completions": len(text.rows), "ended by themselves": text.stopped}
            for (t, split), text in material.items()
        ],
        "seconds": time.monotonic() - began,
    })  # fmt: skip
    stream = Stream(form, engine, prompts, place)
    _train(stream, progress, began, seconds, form.reserve)
    looks = Archive(looks_path(place, stream.shard))
    ended = sum(stream.finishes) / max(1, len(stream.finishes))
    progress.keep({"shards": stream.shard, "tokens": stream.tokens, "ended by themselves": ended})
    weights = {name: stream.heads[name].weights() for name in stream.begun}
    left_out = [one for one in wanted() if one.head in weights and one.name not in looks]
    for one in tqdm(left_out, desc="evaluation", unit="look"):
        at = time.monotonic()
        text = material[one.temperature, one.split]
        with torch.no_grad():
            looks.add(one.name, look(form, model, weights[one.head], text, one.temperature))
        progress.keep({"look": one.name, "seconds": time.monotonic() - at})
    return looks.path


def train_share(
    form: Form, model: Policy, prompts: Sequence[RealPrompt], place: Path, seconds: float | None, share: Share
) -> int:
    """Train a share of the heads beside processes with the others, evaluate nothing; return how many shards."""
    began = time.monotonic()
    stream = Stream(form, make_engine(form, model), prompts, place, share)
    _train(stream, _progress(form, place / f"share-{share[0]}.json"), began, seconds, 0.0)
    return stream.shard


def sample_ahead(form: Form, model: Policy, prompts: Sequence[RealPrompt], place: Path, seconds: float | None) -> int:
    """Sample rollouts and compute their states until the planned tokens are reached or the time is over, and train
    nothing; return how many shards there are."""
    began, engine = time.monotonic(), make_engine(form, model)
    tokens = shard = 0
    with tqdm(total=form.tokens, desc="rollouts", unit="token") as bar:
        while tokens < form.tokens and (seconds is None or time.monotonic() - began < seconds):
            answers = kept_shard(form, engine, prompts, place, shard)
            kept_states(form, model, [answer.row for answer in answers], shard_path(form, place, shard))
            found = sum(len(answer.answer) for answer in answers)
            tokens, shard = tokens + found, shard + 1
            bar.update(found)
    return shard


def _progress(form: Form, path: Path) -> Progress:
    progress = Progress(path=path, form=form, place=record.place(record.begin()))
    if form.resumable and path.is_file():
        progress.rows = json.loads(path.read_text())["rows"]  # of the sittings before
    return progress


def _train(stream: Stream, progress: Progress, began: float, seconds: float | None, reserve: float) -> None:
    """Train on shard after shard as long as time allows."""
    slowest = 0.0  # seconds of a shard that heads were trained on
    with tqdm(total=stream.form.tokens, desc="rollouts and training", unit="token") as bar:
        fresh = 0  # shards of this sitting that a head was trained on
        while stream.tokens < stream.form.tokens:
            left = float("inf") if seconds is None else seconds - (time.monotonic() - began)
            if left < reserve + slowest and fresh:
                break
            before, at = stream.tokens, time.monotonic()
            new = bool(stream.owners())
            stream.step(progress.keep)
            slowest = max(slowest, time.monotonic() - at)
            fresh += new
            bar.update(stream.tokens - before)
