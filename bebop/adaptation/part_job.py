"""Common base of the jobs that train parts: one process, completions of the model itself, checkpoints, a card."""

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from tqdm import tqdm

from bebop.adaptation.corpus import begun, run_engine, size_of_states
from bebop.adaptation.evaluation import measured
from bebop.adaptation.ranks import Ranks
from bebop.command import shown_command, shown_path, stoppable, writing
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import check
from bebop.config.job import DecodingConfig, TrainerConfig
from bebop.errors import UserError
from bebop.metrics.sinks import JsonlSink
from bebop.model.backbone import Policy
from bebop.model.parts import PartCard, backbone_fingerprint, save_part
from bebop.report.verdict import Said, ended
from bebop.run_dir import state_codec as codec
from bebop.run_dir.checkpoints import HEADS, Store, seal, verify
from bebop.run_dir.folder import OVERRIDES
from bebop.systems import SYSTEMS
from bebop.trainer.chains import TokenRow
from bebop.trainer.optim import GuardedAdamW, load_optimizer_state, optimizer_state
from bebop.trajectory import Prompt

STATE = "head"  # of head.json and head.safetensors
PLACES = ("dir=", "out=", "resume=")  # settings that do not affect the part


class PartJob:
    """Base of the training jobs of parts.

    ``python -m bebop.adapt part=NAME`` makes a job in the run folder, then calls ``prepare`` and ``run``.
    """

    policy: Policy
    found: Path | None = None  # checkpoint to resume from

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks) -> None:
        """Store the configuration.

        Raises:
            UserError: There are several processes, or the text does not come from the model.
        """
        check(ranks.world == 1, "part", config.part, "its training runs in one process: start it without torchrun")
        check(config.data.source == "sample", "data.source", config.data.source, f"part={config.part} takes sample")
        self.config, self.folder = config, folder
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)

    def written(self) -> dict[str, Path]:
        """Return the output paths of a finished run, by name."""
        return {"part": Path(self.config.out or self.folder / f"{self.config.part}.safetensors")}

    def ended(self, results: str) -> list[str]:
        """Return the lines at the end of a finished run, with a command that decodes with the part."""
        part, paths = self.config.part, self.written()
        users = (one.name for one in SYSTEMS.values() if part in one.needs and not one.train_error and one.exact)
        given = [] if self.config.model.path == "tiny" else [f"model.path={self.config.model.path}"]
        command = ""
        if (system := next(users, None)) is not None:
            place = shown_path(paths["part"])
            command = shown_command("run", f"decoding={system}", *given, f"model.parts.{part}={place}")
        return ended(Said(verdict="", advice="", command=command), paths)

    def resumed(self) -> dict[str, Any] | None:
        """Return the newest checkpoint's state, or None without ``resume`` or before the first checkpoint.

        This method writes nothing.

        Raises:
            UserError: There is neither a checkpoint nor a corpus.
        """
        if not self.config.resume:
            return None
        self.found = store(self.folder).newest_sound()
        if self.found is None and begun(self.folder):
            return None  # it was stopped before its first checkpoint
        if self.found is None:
            raise UserError(f"resume=true: {self.folder} holds no finished checkpoint")
        return read(self.found)

    def save(self, network: nn.Module, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Write the part; ``settings``: the arguments that construct its network."""
        path = self.written()["part"]
        with writing(path):
            save_part(path, network, part_card(self.config, self.folder, self.policy, settings, results))

    def fits(self, rows: Sequence[TokenRow], taps: Sequence[int]) -> bool:
        """Return whether states of some texts, the final ones and those after ``taps``, fit in ``train.cache_mb``."""
        return size_of_states(self.policy, rows, taps) <= self.config.train.cache_mb << 20

    def label(self, text: str) -> str | None:
        """Return the label of a progress bar, or None if the configuration disables progress bars."""
        return text if self.config.progress else None


class StepJob(PartJob):
    """A job with an optimizer: it calls ``optimise`` at construction and ``learn`` when it runs."""

    def optimise(self, network: nn.Module, what: str, *, lr: float, steps: int, warm_up: int) -> None:
        """Make the optimizer of all parameters; the rate rises for ``warm_up`` of ``steps``, then falls as a cosine.

        ``what``: the network in messages, as "block drafter".
        """
        self.what, self.version = what, 0  # steps done
        self.rates = TrainerConfig(lr=lr, steps=steps, lr_schedule="cosine", lr_warmup_steps=warm_up)
        self.optimizer = GuardedAdamW(
            dict(network.named_parameters()),
            self.rates,
            setting="options.lr",
            loss=f"the loss of the {what}",
            causes="weights",
        )

    def prepare(self) -> None:
        """Load the newest checkpoint if ``resume`` is set; write nothing."""
        state = self.resumed()
        if state is None:
            return
        load_optimizer_state(self.optimizer, state, self.what)
        self.version = state["version"]

    def first_look(self, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the result of ``measure`` for the network before its first step; a file keeps it for a resumed run."""
        path = self.folder / "before.json"
        if not (self.config.resume and path.is_file()):
            found = measure()
            with writing(path):
                path.write_text(json.dumps(found) + "\n")
        read_again: dict[str, Any] = json.loads(path.read_text())
        return read_again

    def lengths_by_temperature(self, decoding: DecodingConfig, held_out: Sequence[Prompt], when: str) -> dict[str, Any]:
        """Return accept lengths of decoding, at the temperature of the data and greedy: intervals by name."""
        data, found = self.config.data, {}
        for name, temperature in (("sampled", data.sampling.temperature), ("greedy", 0.0)):
            sampling, label = dataclasses.replace(data.sampling, temperature=temperature), f"{when}: {name}"
            answers = run_engine(
                self.policy, held_out, data, decoding, self.config.seed + 1, self.label(label), sampling=sampling
            )
            interval = measured([p.task for p in held_out], answers, decoding.limit).interval("accept_length")
            found[f"accept_length/{name}/{when}"] = dataclasses.asdict(interval)
        return found

    def learn(self, last: int, update: Callable[[], Mapping[str, float]]) -> None:
        """Run the remaining steps up to ``last``; ``update`` runs one step, counts it and returns its metrics."""
        train = self.config.train
        sink = JsonlSink(self.folder / "metrics.jsonl", self.version or None)
        store(self.folder).set_aside(self.found)
        bar = tqdm(total=last, initial=self.version, desc="train", unit="step", disable=self.label("train") is None)
        with closing(sink), closing(bar), stoppable() as stopped:
            while self.version < last and not stopped():
                numbers = update()
                sink.write(self.version, numbers)
                bar.update()
                bar.set_postfix({name.split("/")[-1]: f"{value:.3g}" for name, value in numbers.items()}, refresh=False)
                due = train.save_every and self.version % train.save_every == 0
                if due or self.version == last or stopped():
                    with writing(self.folder / "checkpoints"):
                        write(self.folder, {"version": self.version, **optimizer_state(self.optimizer)}, train.keep)


# ---- the card: the backbone, the data, and the command that makes the part again


def part_card(
    config: AdaptConfig, folder: Path, policy: Policy, settings: Mapping[str, Any], results: Mapping[str, Any]
) -> PartCard:
    """Return the card of a part that was trained in a run folder.

    ``settings``: the arguments that construct its network.
    """
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
    """Return the command line with the settings that the run was started with."""
    file = folder / OVERRIDES
    given = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else [f"part={config.part}"]
    return shown_command("adapt", *(one for one in given if not one.startswith(PLACES)))


# ---- checkpoints, ``<run>/checkpoints/head_000100/`` (``bebop.run_dir.checkpoints``): without the frozen backbone


def store(folder: Path) -> Store:
    """Return the checkpoints of an adaptation."""
    return Store(folder, HEADS)


def write(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of a state with a ``version``, remove all but the newest ``keep``, and return its path."""
    checkpoints = store(folder)
    staged = checkpoints.staging(state["version"])
    staged.mkdir(parents=True)
    codec.save(state, staged / STATE)
    seal(staged)
    path = checkpoints.publish(staged, state["version"])
    checkpoints.prune(keep, path)
    return path


def read(path: Path) -> dict[str, Any]:
    """Return the state in a checkpoint; raise ``UserError`` if it is damaged."""
    verify(path)
    state: dict[str, Any] = codec.load(path / STATE)
    return state
