"""Training of a pivot classifier: ``python -m bebop.adapt part=pivot`` (SPEC 4.2).

The job samples completions and finds drafts that would be rejected. It continues from them, labels them by the outcome
of the continuations, and trains the classifier. The weights with the best validation result are kept.
"""

import copy
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from bebop.adaptation.candidates import Candidate, Continuations, Search, find_candidates, layer_states
from bebop.adaptation.corpus import drafting_config, sample_corpus
from bebop.adaptation.part_job import PartJob, store, write
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import check
from bebop.errors import UserError
from bebop.metrics.sinks import JsonlSink
from bebop.model.checkpoint import load_policy
from bebop.run_dir.checkpoints import write_text
from bebop.systems.pad.labels import (
    SPLITS,
    Bools,
    Floats,
    Rollouts,
    as_text,
    auc,
    loss_of_value,
    pivots,
    reliability,
    split_of,
    split_results,
)
from bebop.systems.pad.network import PivotNetwork, default_layer
from bebop.systems.pad.options import PivotTraining
from bebop.tasks.rewards import checked, make_reward
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trajectory import Prompt

# ---- the classifier


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Inputs and labels of n candidates; the label says whether a candidate is a pivot."""

    hidden: Tensor  # [n, d]
    p: Tensor  # [n] probability under the target
    entropy: Tensor  # [n] of the target, nats
    pivots: Tensor  # [n] 0 or 1

    def of(self, chosen: Bools) -> Self:
        """Return the examples selected by a mask [n]."""
        mask = torch.from_numpy(chosen)
        return type(self)(
            hidden=self.hidden[mask], p=self.p[mask], entropy=self.entropy[mask], pivots=self.pivots[mask]
        )

    def __len__(self) -> int:
        return len(self.pivots)


class PivotTrainer:
    """AdamW trainer on a training split; ``version`` counts updates."""

    def __init__(
        self, network: PivotNetwork, train: Examples, validation: Examples, *, lr: float, weight_decay: float, seed: int
    ) -> None:
        """Set up training on two splits, both with pivots and non-pivots; the first one standardises the features."""
        self.network, self.train, self.validation, self.seed = network, train, validation, seed
        network.standardise(train.hidden, train.p, train.entropy)
        counts = torch.bincount(train.pivots, minlength=2).float()
        self.weights = len(train) / (2 * counts)  # of a class, inverse to its frequency
        self.optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=weight_decay)
        self.version = 0
        self.best: tuple[float, int, dict[str, Tensor]] = (-1.0, 0, copy.deepcopy(network.state_dict()))

    def update(self, rows: int) -> float:
        """Take one step on ``rows`` examples, shuffled anew each epoch, and return its loss."""
        chosen = torch.tensor(rows_of_step(len(self.train), rows, self.seed, self.version))
        train = self.train
        logits = self.network(train.hidden[chosen], train.p[chosen], train.entropy[chosen])
        loss = cross_entropy(logits, train.pivots[chosen], weight=self.weights)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.version += 1
        return float(loss.detach())

    def evaluate(self) -> float:
        """Return the AUC on the validation split; store the weights if it is the best so far."""
        found = auc(scores(self.network, self.validation), self.validation.pivots.numpy().astype(bool))
        if found > self.best[0]:
            self.best = (found, self.version, copy.deepcopy(self.network.state_dict()))
        return found

    def take_best(self) -> tuple[float, int]:
        """Load the best weights into the network, and return their AUC and version."""
        self.network.load_state_dict(self.best[2])
        return self.best[0], self.best[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the complete state for an exact resume."""
        return {
            "version": self.version,
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best": list(self.best),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict``."""
        self.version = state["version"]
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])
        found, version, weights = state["best"]
        self.best = (found, version, weights)


@torch.no_grad()
def scores(network: PivotNetwork, examples: Examples) -> Floats:
    """Return the pivot scores [n] of the examples."""
    encoded = network.encode(examples.hidden)
    return np.asarray(network.score(encoded, examples.p, examples.entropy).double().numpy())


# ---- the job


LABELS, AGAIN = "labels.jsonl", "labels_again.jsonl"


class PivotAdaptation(PartJob):
    """Job behind ``part=pivot``, in one process. Finished labels are kept for a resume."""

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
        """Find the checkpoint to resume from; writes nothing."""
        self.state = self.resumed()

    def run(self) -> str:
        """Run every remaining phase and return a summary."""
        decoding, label = drafting_config(self.policy, draft_tokens=self.options.depth), self.label("sample")
        prompts, rows, _ = sample_corpus(self.config, self.policy, self.folder, decoding, label)
        if self.state is None:
            write(self.folder, {"version": 0}, self.config.train.keep)  # so that labelling can be resumed
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
        """Return the files that a finished run leaves for its user, by name."""
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
        """Return rollouts of all candidates: those in the file, and the rest, appended to it as they finish."""
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
            write_text(path, _lines(done))  # drops an incomplete last line
        bar = tqdm(total=len(found), initial=len(done), desc=name, disable=not self.config.progress)
        with writing(path), path.open("a", encoding="utf-8") as file, bar:
            for part in continued.run(prompts, rows, found[len(done) :], bar):
                file.write(_lines(part))
                file.flush()
                done += part
        return done

    # ---- training

    def _train(self, labelled: Sequence[Rollouts]) -> tuple[PivotNetwork, Examples, list[str]]:
        """Return the best network on the validation split, all examples, and the split of each."""
        config, options = self.config, self.options
        splits = [split_of(row.prompt, config.seed) for row in labelled]
        examples = self.examples(labelled)
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

    def examples(self, labelled: Sequence[Rollouts]) -> Examples:
        """Return the classifier's inputs and labels for labelled candidates."""
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
    """Read the rollouts of a file, without an incomplete last line."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    rows = [json.loads(line) for line in lines]
    return [Rollouts(**{**row, "prefix": tuple(row["prefix"])}) for row in rows]


def _lines(rows: Sequence[Rollouts]) -> str:
    return "".join(json.dumps(dataclasses.asdict(row)) + "\n" for row in rows)
