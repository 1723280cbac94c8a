"""Training of pseudo hidden states on completions of the model itself: ``python -m bebop.adapt part=firp`` (SPEC 3.2).

Steps are trained one after another, k = 1..K. While step k is trained the earlier ones are present and frozen, as in
drafting, and later ones are absent.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.adaptation.corpus import drafting_config, question_streams, run_engine, sample_corpus, token_rows
from bebop.adaptation.part_job import StepJob
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.config.adapt import AdaptConfig
from bebop.config.tree_shape import likeliest, rank_chances
from bebop.errors import UserError
from bebop.metrics.intervals import ratio
from bebop.model.checkpoint import load_policy
from bebop.systems.firp.losses import (
    BEYOND,
    MEASURES,
    ReadRow,
    cycles,
    drafts_of,
    firp_loss,
    lay_out,
    read_rows,
    sums,
    token_ranks,
)
from bebop.systems.firp.network import PseudoStates, middle_layers, read_text, size_of_text
from bebop.systems.firp.options import FirpTraining
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trainer.objectives import Sampling
from bebop.trainer.optim import learning_rate
from bebop.trajectory import Prompt

NODES = (16, 32, 63)  # sizes of the trees whose accept length the card lists


def _drafted(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts whose first cycle drafts: its anchor is the token before the last."""
    return [prompt for prompt in prompts if len(prompt.token_ids) > 1]


class FirpTrainer(StepJob):
    """Training job: sample completions, train step by step, measure on held-out completions, and write the part."""

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model, freeze it and create matrices for it."""
        super().__init__(config, folder, ranks)
        self.options = options = config.of(FirpTraining)
        self.policy = load_policy(config.model)
        self.policy.backbone.requires_grad_(False)
        backbone = self.policy.backbone.config
        self.settings: dict[str, Any] = {
            "hidden_size": backbone.hidden_size,
            "layers": list(options.layers or middle_layers(backbone.num_hidden_layers)),
        }
        self.network = PseudoStates(**self.settings).to(self.policy.device)
        self.network.check(self.policy)
        self.optimise(self.network, "pseudo states", lr=options.lr, steps=options.steps, warm_up=20)

    @property
    def last(self) -> int:
        """Return the total number of updates."""
        return self.options.steps * len(self.network.layers)

    def run(self) -> str:
        """Run all remaining phases and return the final message.

        Raises:
            UserError: No prompt to calibrate on, or no held-out prompt, has two tokens.
        """
        decoding, label = drafting_config(self.policy), self.label("sample")
        streams = question_streams(self.config, self.policy)
        for what, prompts in (("calibrate", streams[0][: self.options.calibration]), ("measure", streams[1])):
            if not _drafted(prompts):
                raise UserError(
                    f"part=firp: the {len(prompts)} prompts to {what} on have a single token each, and drafts begin at "
                    "the token before the last; give longer prompts"
                )
        training, rows, held_out = sample_corpus(
            self.config, self.policy, self.folder, decoding, label, streams=streams
        )
        self._train(rows)
        self._calibrate(training)
        answers = run_engine(
            self.policy, held_out, self.config.data, decoding, self.config.seed + 1, self.label("held out")
        )
        results = self.measured(token_rows(held_out, answers)) | self.accept_lengths(held_out)
        self.save(self.network, self.settings, results)
        lines = [f"{name:40}{interval['value']:.3f}" for name, interval in results.items()]
        return "\n".join([*lines, ""])

    def measured(self, rows: Sequence[TokenRow]) -> dict[str, Any]:
        """Return the measures on some completions as intervals, by name and step."""
        found, places = sums(self.policy, self.network, rows, Sampling.of(self.config.data.sampling))
        return {
            f"{name}/{step + 1}": dataclasses.asdict(ratio(found[:, step, i].numpy(), places[:, step].numpy()))
            for i, name in enumerate(MEASURES)
            for step in range(places.shape[1])
        }

    def _calibrate(self, training: Sequence[Prompt]) -> None:
        """Count how often tokens of each rank are right, on some training prompts at temperature 0."""
        rows = self._ranks(training[: self.options.calibration], self.config.seed, "calibrate")
        self.network.chances = rank_chances([r for r in row if r != BEYOND] for answer in rows for row in answer)
        self.settings["chances"] = [[round(chance, 5) for chance in row] for row in self.network.chances]

    def accept_lengths(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        """Return tokens per cycle at temperature 0 by number of tree nodes, as intervals over prompts; K nodes form the
        chain.
        """
        ranks, steps = self._ranks(prompts, self.config.seed + 1, "greedy"), len(self.network.layers)
        tokens = [len(answer) for answer in ranks]
        shapes = {n: likeliest(self.network.chances, n, steps) for n in NODES}
        shapes[steps] = tuple((0,) * depth for depth in range(1, steps + 1))
        return {
            f"accept_length/{nodes}": dataclasses.asdict(ratio(tokens, [cycles(answer, {*shape}) for answer in ranks]))
            for nodes, shape in sorted(shapes.items())
        }

    def _ranks(self, prompts: Sequence[Prompt], seed: int, label: str) -> list[list[list[int]]]:
        """Return the ranks of the tokens in the model's greedy completions (``token_ranks``).

        Prompts of a single token are left out.
        """
        prompts = _drafted(prompts)
        data, decoding = self.config.data, drafting_config(self.policy)
        greedy = dataclasses.replace(data.sampling, temperature=0.0)
        answers = run_engine(self.policy, prompts, data, decoding, seed, self.label(label), sampling=greedy)
        rows = token_rows(prompts, answers)
        read = read_text(self.policy, self.network.layers, [row.token_ids for row in rows])
        return token_ranks(drafts_of(self.policy, self.network), rows, read)

    def _train(self, rows: Sequence[TokenRow]) -> None:
        """Take all remaining updates, from the newest checkpoint on."""
        read = self._read(rows)

        def next_step() -> dict[str, float]:
            chosen = rows_of_step(len(rows), self.options.rows_per_step, self.config.seed, self.version)
            return self.update([read[i] for i in chosen] if read else self._now([rows[i] for i in chosen]))

        self.learn(self.last, next_step)

    def _read(self, rows: Sequence[TokenRow]) -> list[ReadRow]:
        """Return the pseudo states' inputs of all completions if they fit into memory; else an empty list."""
        tokens = sum(len(row.token_ids) for row in rows)
        fits = tokens * size_of_text(self.policy, self.network.layers) <= self.config.train.cache_mb << 20
        return self._now(rows) if fits else []

    def _now(self, rows: Sequence[TokenRow]) -> list[ReadRow]:
        return read_rows(self.policy, self.network.layers, rows)

    def update(self, rows: Sequence[ReadRow]) -> dict[str, float]:
        """Take one optimizer step on random anchors of some completions; seed and step determine the anchors."""
        options = self.options
        stage, place = divmod(self.version, options.steps)
        for k, one in enumerate(self.network.maps):
            one.requires_grad_(k == stage)
        texts = lay_out(rows, options.anchors, (self.config.seed << 32) + self.version)
        kind = "kl" if place < options.warm * options.steps else options.objective
        self.optimizer.zero_grad()
        loss = firp_loss(
            self.policy, self.network, texts, stage + 1, kind=kind, sampling=Sampling.of(self.config.data.sampling)
        )
        loss.backward()
        numbers = self.optimizer.guarded_step(learning_rate(self.rates, place))
        self.version += 1
        return {f"firp/{name}": value for name, value in {"loss": float(loss.detach()), **numbers}.items()} | {
            "firp/step": float(stage + 1)
        }
