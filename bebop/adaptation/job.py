"""An adaptation from end to end: sequences, acceptance before, training, acceptance after, checkpoint and card."""

import copy
import dataclasses
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.adaptation.corpus import (
    CORPUS,
    HELD_OUT,
    MIN_HELD_OUT,
    backbone_states,
    begun,
    drafting_config,
    from_file,
    kept_rows,
    question_streams,
    run_engine,
    sample_corpus,
    sample_turns,
    size_of_states,
    split_rows,
)
from bebop.adaptation.evaluation import estimated, measured
from bebop.adaptation.part_job import read, store, write
from bebop.adaptation.probe import probe
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.adaptation.results import Results, Snapshot
from bebop.adaptation.served import ServedEngines
from bebop.command import stoppable, writing
from bebop.config.adapt import AdaptConfig
from bebop.errors import UserError
from bebop.metrics.catalogue import tracker_layout
from bebop.metrics.sinks import JsonlSink, Sink, TensorBoardSink
from bebop.model.checkpoint import load_policy, mtp_layout, resolve, save_policy, trained_head
from bebop.report.adapted import judge, write_card, write_page, written
from bebop.report.verdict import ended
from bebop.systems import SYSTEMS as ALL_SYSTEMS
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling, make_objective
from bebop.trajectory import Prompt

SYSTEMS = ("bebop", "target_only")


class Adaptation:
    """One rank of an adaptation. Every rank runs the same code; rank 0 writes."""

    found: Path | None = None  # checkpoint to resume from

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model. If several ranks share it, load its backbone a second time, to be split for training."""
        make_objective(config.head.objective), make_objective(config.train.warm_objective)
        self.config, self.folder, self.ranks = config, folder, ranks
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)  # a fresh head must be the same on every rank
        model = dataclasses.replace(config.model, init_mtp=True)
        self.policy = load_policy(model, any_backbone=True)
        place, layers = resolve(model.path), self.policy.backbone.config.num_hidden_layers
        self.fresh = mtp_layout(place, layers) is None and trained_head(place) is None
        self.sampling = Sampling.of(config.data.sampling)
        backbone = self.policy.backbone if ranks.world == 1 else load_policy(model, any_backbone=True).backbone
        trained = dataclasses.replace(self.policy, backbone=backbone, mtp=copy.deepcopy(self.policy.mtp))
        self.trainer = HeadTrainer(FSDPBackend(trained, self.sampling, ranks.rank, ranks.world), config.head)
        self.seconds: dict[str, float] = {}
        self.read: tuple[list[TokenRow], list[Prompt]] | None = None
        self.streams: tuple[list[Prompt], list[Prompt]] | None = None

    def prepare(self) -> None:
        """Check the checkpoint to resume from, and the text, before anything is written."""
        self.restore()
        if self.config.data.source == "file":
            self.read = self._split_file(from_file(self.config.data, self.policy))
        elif not self.config.task.turns:
            self.streams = question_streams(self.config, self.policy)

    def restore(self) -> None:
        """Load the newest checkpoint if ``resume`` is set; write nothing."""
        if not self.config.resume:
            return
        newest = {0: (store(self.folder).newest_sound(), begun(self.folder))} if self.ranks.rank == 0 else {}
        path, sampled = self.ranks.union(newest)[0]
        if path is None and sampled:
            return  # it was stopped before its first checkpoint
        if path is None:
            raise UserError(f"resume=true: {self.folder} holds no finished checkpoint")
        self.found = path
        self._load(path)

    def run(self) -> Results:
        """Run all remaining phases."""
        began = time.perf_counter()
        with closing(ServedEngines(self.config, self.ranks)) as served:
            rows, held_out = self._sequences(served)
            self._clock("sequences", began)
            text = self._held_out_text(held_out, served)
        before = self._snapshot(held_out, text, "before")
        self._train(rows, text)
        after, known = self._snapshot(held_out, text, "after"), {row.prompt for row in rows}
        results = Results(
            before=before,
            after=after,
            rows=len(rows),
            tokens=sum(len(row.answer) for row in rows),
            repeated=sum(prompt.token_ids in known for prompt in held_out),
            steps=self.trainer.version,
            fresh=self.fresh,
            estimated=self.policy.stock,
            seconds=self.seconds,
        )
        if self.ranks.rank == 0:
            self._write(results)
        self.ranks.wait()
        return results

    def ended(self, results: Results) -> list[str]:
        """Return the lines at the end of a finished run."""
        paths = {"model": written(self.folder, self.config), "report": self.folder / "report.html"}
        return ended(judge(self.folder, self.config, results), paths)

    # ---- sequences

    def _sequences(self, served: ServedEngines) -> tuple[list[TokenRow], list[Prompt]]:
        """Return the text to train on and the held-out prompts.

        Sampled text is stored in the run folder, for a resumed run and for other runs.
        """
        if self.config.data.source == "file":
            return self.read or self._split_file(from_file(self.config.data, self.policy))
        label, decoding = self._label("sample"), drafting_config(self.policy)
        if self.config.task.turns:
            path = self.folder / CORPUS
            _, rows, held_out = sample_turns(self.config, self.policy, path, decoding, label, self.ranks, served)
        else:
            _, rows, held_out = sample_corpus(
                self.config, self.policy, self.folder, decoding, label, self.ranks, self.streams, served
            )
        return rows, held_out

    def _split_file(self, rows: list[TokenRow]) -> tuple[list[TokenRow], list[Prompt]]:
        """Hold out the last prompts of a file: the model itself completes them."""
        training, held_out = split_rows(self.config, rows)
        room = self.config.data.max_length - self.config.data.sampling.max_new_tokens
        tasks = {row.prompt: row.task for row in held_out if len(row.prompt) <= room}
        if len(tasks) < MIN_HELD_OUT:
            longest = max(len(row.prompt) for row in held_out)
            limit = f"data.max_length={self.config.data.max_length}"
            raise UserError(f"{limit}: held-out prompts of up to {longest} tokens leave no room for completions")
        prompts = [
            Prompt(index=i, task=task, text="", token_ids=ids, item={}) for i, (ids, task) in enumerate(tasks.items())
        ]
        return training, prompts

    # ---- measuring

    def _held_out_text(self, held_out: Sequence[Prompt], served: ServedEngines) -> list[TokenRow]:
        """Return completions of the held-out prompts. Every head is probed on them."""
        began, config = time.perf_counter(), self.config
        decoding = drafting_config(self.policy, draft_tokens=config.evaluation.draft_tokens)
        path, label, seed = self.folder / HELD_OUT, self._label("held out"), config.seed + 1
        text = kept_rows(config, self.policy, held_out, path, decoding, seed, label, self.ranks, served)
        self._clock("held out", began)
        return text

    def _snapshot(self, held_out: Sequence[Prompt], text: Sequence[TokenRow], when: str) -> Snapshot:
        """Decode the held-out prompts with every system and probe the text.

        If the engine cannot decode the model, estimate the statistics on the text, which the model itself wrote.
        """
        began = time.perf_counter()
        drafts = self.config.evaluation.draft_tokens
        if self.policy.stock:
            probed = probe(self.policy, text, drafts, self.sampling)
            decoded = {system: estimated(probed, text, greedy=not ALL_SYSTEMS[system].sampled) for system in SYSTEMS}
            self._clock(when, began)
            return Snapshot(decoded=decoded, probe=probed)
        decoded = {}
        for system in SYSTEMS:
            decoding, label = drafting_config(self.policy, system, drafts), self._label(f"{when}: {system}")
            answers = run_engine(
                self.policy, held_out, self.config.data, decoding, self.config.seed + 1, label, self.ranks
            )
            decoded[system] = measured([p.task for p in held_out], answers, drafts)
        snapshot = Snapshot(decoded=decoded, probe=probe(self.policy, text, drafts, self.sampling))
        self._clock(when, began)
        return snapshot

    # ---- training

    def _train(self, rows: Sequence[TokenRow], text: Sequence[TokenRow]) -> None:
        """Train from the newest checkpoint to the last step, then copy the weights to the head of ``self.policy``."""
        began = time.perf_counter()
        train, trainer = self.config.train, self.trainer
        sinks = self._sinks() if self.ranks.rank == 0 else []
        bar = tqdm(
            total=train.steps, initial=trainer.version, desc="train", disable=self._label("train") is None, unit="step"
        )
        states = self._states(rows)
        if self.ranks.rank == 0:
            store(self.folder).set_aside(self.found)  # newer checkpoints: damaged or abandoned
        with ExitStack() as closed:
            for part in (*sinks, bar):
                closed.callback(part.close)
            stopped = closed.enter_context(stoppable())
            stop = False
            while trainer.version < train.steps and not stop:
                chosen = rows_of_step(len(rows), train.rows_per_step, self.config.seed, trainer.version)
                known = None if states is None else [states[i] for i in chosen]
                numbers = trainer.update([rows[i] for i in chosen], self._objective(trainer.version), known)
                last, stop = trainer.version == train.steps, self.ranks.any(stopped())
                if last or (train.eval_every and trainer.version % train.eval_every == 0):
                    numbers |= self._progress(text)
                for sink in sinks:
                    sink.write(trainer.version, numbers)
                bar.update()
                bar.set_postfix({name.split("/")[-1]: f"{value:.3g}" for name, value in numbers.items()}, refresh=False)
                if last or stop or (train.save_every and trainer.version % train.save_every == 0):
                    self._save()
        self._sync()
        self._clock("train", began)

    def _states(self, rows: Sequence[TokenRow]) -> list[Tensor] | None:
        """Return the backbone's states of the training text, or None.

        The states are cached only in a single process, if they are used more than once and fit in ``train.cache_mb``.
        """
        used = self.config.train.steps * self.config.train.rows_per_step
        fits = size_of_states(self.policy, rows) <= self.config.train.cache_mb << 20
        return backbone_states(self.policy, rows) if fits and used > len(rows) and self.ranks.world == 1 else None

    def _objective(self, step: int) -> str:
        """Return the objective of a step: the warm-up objective first, then the configured one."""
        train = self.config.train
        return train.warm_objective if step < train.warm(self.fresh) else self.config.head.objective

    def _progress(self, text: Sequence[TokenRow]) -> dict[str, float]:
        """Return metrics of the held-out text during training; they are cheap enough for frequent evaluation."""
        self._sync()
        probed = probe(self.policy, text[:64], self.config.evaluation.draft_tokens, self.sampling)
        lengths = {
            "eval/accept_length": probed.accept_length(),
            "eval/accept_length_greedy": probed.accept_length(True),
        }
        steps = range(self.config.evaluation.draft_tokens)
        overlaps = {f"eval/overlap/{k + 1}": probed.mean(probed.numbers["overlap"][:, k]) for k in steps}
        entropy = {"eval/draft_entropy": probed.mean(probed.numbers["draft_entropy"][:, 0])}
        return {name: interval.value for name, interval in (lengths | overlaps | entropy).items()}

    def _sync(self) -> None:
        """Copy the weights of the trained head to the head that decodes."""
        assert self.policy.mtp is not None
        own = dict(self.policy.mtp.named_parameters())
        with torch.no_grad():
            for name, tensor in self.trainer.weights().items():
                own[name].copy_(tensor)

    def _load(self, path: Path) -> None:
        self.trainer.load_state_dict(read(path))

    def _save(self) -> None:
        state = self.trainer.state_dict()
        if self.ranks.rank == 0:
            with writing(self.folder / "checkpoints"):
                write(self.folder, state, self.config.train.keep)

    # ---- writing

    def _write(self, results: Results) -> None:
        """Write the checkpoint in its source's layout, its card, the numbers and the page."""
        out = written(self.folder, self.config)
        with writing(out):
            save_policy(self.policy, out, source=resolve(self.config.model.path))
            write_card(out, self.config, results)
        with writing(self.folder):
            (self.folder / "results.json").write_text(json.dumps(results.as_dict(), indent=2) + "\n")
            write_page(self.folder, self.config, results)

    def _sinks(self) -> list[Sink]:
        start = self.trainer.version
        sinks: list[Sink] = [JsonlSink(self.folder / "metrics.jsonl", start or None)]
        if self.config.tensorboard:
            config = dataclasses.asdict(self.config)
            layout = tracker_layout(adapted=True)
            sinks.append(TensorBoardSink(self.folder / "tensorboard", start + 1 if start else None, config, layout))
        return sinks

    def _label(self, text: str) -> str | None:
        return text if self.config.progress and self.ranks.rank == 0 else None

    def _clock(self, phase: str, began: float) -> None:
        self.seconds[phase] = round(time.perf_counter() - began, 1)
