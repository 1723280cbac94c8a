"""A pivot classifier from end to end: answers, rejected drafts, their continuations, labels, training, the part."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bebop.adaptation.candidates import Candidate, Continuations, Search, find_candidates, layer_states
from bebop.adaptation.corpus import drafting_config, sample_corpus
from bebop.adaptation.part_job import PartJob, store, write
from bebop.adaptation.pivot_results import as_text, reliability, split_results
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config_adapt import AdaptConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.model.pivot import PivotNetwork, default_layer
from bebop.options import PivotTraining
from bebop.parsing import check
from bebop.sinks import JsonlSink
from bebop.store import write_text
from bebop.tasks.rewards import checked, make_reward
from bebop.trainer.chains import TokenRow
from bebop.trainer.pivot import Examples, PivotTrainer, scores
from bebop.trainer.pivot_labels import SPLITS, Rollouts, loss_of_value, pivots, split_of
from bebop.trajectory import Prompt

LABELS, AGAIN = "labels.jsonl", "labels_again.jsonl"


class PivotAdaptation(PartJob):
    """See ``python -m bebop.adapt part=pivot``. In one process; what is labelled already is kept for a resume."""

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        super().__init__(config, folder, ranks)
        self.options = config.of(PivotTraining)
        self.policy = load_policy(config.model, need_head=True)
        layers = int(self.policy.backbone.config.num_hidden_layers)
        own = self.options.layer
        check(own is None or own < layers, "options.layer", own, f"give a number from 0 to {layers - 1}")
        self.layer = default_layer(layers) if own is None else own
        self.reward = make_reward(config.task)
        self.state: dict[str, Any] | None = None

    def prepare(self) -> None:
        """Find the checkpoint to go on from; writes nothing."""
        self.state = self.resumed()

    def run(self) -> str:
        """Every phase that is left; a summary."""
        decoding, label = drafting_config(self.policy, draft_tokens=self.options.depth), self.label("sample")
        prompts, rows, _ = sample_corpus(self.config, self.policy, self.folder, decoding, label)
        if self.state is None:
            write(self.folder, {"version": 0}, self.config.train.keep)  # labels can be gone on with
        search = self._search()
        labelled = self._labelled(prompts, rows, find_candidates(self.policy, rows, search), LABELS, 0)
        share = self.options.twice * len(prompts)
        again = find_candidates(self.policy, rows, dataclasses.replace(search, again=1))
        second = self._labelled(prompts, rows, [c for c in again if c.row < share], AGAIN, 1)
        network, examples, splits = self._train(labelled)
        results = self._results(labelled, second, network, examples, splits)
        self._write(network, results)
        return as_text(results)

    def written(self) -> dict[str, Path]:
        """What a finished run leaves for its user."""
        return {**super().written(), "results": self.folder / "results.json"}

    # ---- labels

    def _search(self) -> Search:
        options = self.options
        return Search(
            sampling=self.config.data.sampling,
            depth=options.depth,
            places=options.places,
            rollouts=options.rollouts,
            p_min=options.p_min,
            seed=self.config.seed,
            draft_temperature=options.draft_temperature,
        )

    def _labelled(
        self, prompts: Sequence[Prompt], rows: Sequence[TokenRow], found: Sequence[Candidate], name: str, again: int
    ) -> list[Rollouts]:
        """Rollouts of all candidates: those in the file, and the rest, which join it as they come."""
        path = self.folder / name
        done = read_rollouts(path) if self.config.resume else []
        continued = Continuations(
            self.policy,
            self.config.data,
            lambda text, prompt: checked(self.reward, text, prompt),
            seed=self.config.seed + again,
            rollouts=self.options.rollouts,
            success=self.options.success,
            judge=self.options.judge,
        )
        with writing(path):
            write_text(path, _lines(done))  # without a last line that was not finished
        bar = tqdm(total=len(found), initial=len(done), desc=name, disable=not self.config.progress)
        with writing(path), path.open("a", encoding="utf-8") as file, bar:
            for part in continued.run(prompts, rows, found[len(done) :], bar):
                file.write(_lines(part))
                file.flush()
                done += part
        return done

    # ---- training

    def _train(self, labelled: Sequence[Rollouts]) -> tuple[PivotNetwork, Examples, list[str]]:
        """The best network by validation, all examples, and the split of each."""
        config, options = self.config, self.options
        splits = [split_of(row.prompt, config.seed) for row in labelled]
        examples = self._examples(labelled)
        train, validation, test = (examples.of(np.array([s == name for s in splits])) for name in SPLITS)
        for name, part in zip(SPLITS, (train, validation, test), strict=True):
            if len(part) == 0 or part.pivots.min() == part.pivots.max():
                raise UserError(
                    f"data.sequences={config.data.sequences} gives {len(part)} candidates in the {name} split, which "
                    f"must hold pivots and others; give more, or raise options.places={options.places}"
                )
        torch.manual_seed(config.seed)
        network = PivotNetwork(**self._settings())
        trainer = PivotTrainer(
            network, train, validation, lr=options.lr, weight_decay=options.weight_decay, seed=config.seed
        )
        if self.state is not None and self.state["version"] > 0:
            trainer.load_state_dict(self.state)
        store(self.folder).set_aside(self.found)
        sink = JsonlSink(self.folder / "metrics.jsonl", trainer.version or None)
        every = config.train.eval_every or config.train.steps
        with tqdm(total=config.train.steps, initial=trainer.version, desc="train", disable=not config.progress) as bar:
            while trainer.version < config.train.steps:
                numbers = {"train/loss": trainer.update(config.train.rows_per_step)}
                last = trainer.version == config.train.steps
                if last or trainer.version % every == 0:
                    numbers["auc"] = trainer.evaluate()
                sink.write(trainer.version, numbers)
                bar.update()
                if last or (config.train.save_every and trainer.version % config.train.save_every == 0):
                    with writing(self.folder / "checkpoints"):
                        write(self.folder, trainer.state_dict(), config.train.keep)
        sink.close()
        trainer.take_best()
        return network.eval(), examples, splits

    def _settings(self) -> dict[str, Any]:
        options = self.options
        return {
            "size": int(self.policy.backbone.config.hidden_size),
            "layer": self.layer,
            "position": options.feat_pos,
            "features": options.features,
            "inner": options.inner,
            "middle": options.middle,
        }

    def _examples(self, labelled: Sequence[Rollouts]) -> Examples:
        texts = [(*row.prefix, row.token) for row in labelled]
        place = ("pred", "cand").index(self.options.feat_pos)
        judged = np.array([row.judged for row in labelled], dtype=bool)
        labels = pivots(loss_of_value(labelled, self.options.definition), self.options.tol, judged)
        return Examples(
            hidden=layer_states(self.policy, texts, (self.layer,))[:, 0, place],
            p=torch.tensor([row.p for row in labelled]),
            entropy=torch.tensor([row.entropy for row in labelled]),
            pivots=torch.from_numpy(labels).long(),
        )

    # ---- writing

    def _results(
        self,
        labelled: Sequence[Rollouts],
        second: Sequence[Rollouts],
        network: PivotNetwork,
        examples: Examples,
        splits: Sequence[str],
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"splits": {}}
        given, labels = scores(network, examples), examples.pivots.numpy().astype(bool)
        for name in SPLITS:
            own = np.array([split == name for split in splits])
            rows = [row for row, one in zip(labelled, own, strict=True) if one]
            found["splits"][name] = split_results(rows, given[own], labels[own])
        found["reliability"] = reliability(labelled[: len(second)], second, self.options.tol) if second else None
        return found

    def _write(self, network: PivotNetwork, results: dict[str, Any]) -> None:
        test = {key: value for key, value in results["splits"]["test"].items() if key not in ("calibration", "rules")}
        self.save(network, self._settings(), {"test": test, "reliability": results["reliability"]})
        path = self.written()["results"]
        with writing(path):
            path.write_text(json.dumps(results, indent=2) + "\n")


def read_rollouts(path: Path) -> list[Rollouts]:
    """What a file holds, but for a last line that was not finished."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    return [Rollouts(**{**row, "prefix": tuple(row["prefix"])}) for row in rows]


def _lines(rows: Sequence[Rollouts]) -> str:
    return "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)


EntryClass = PivotAdaptation
