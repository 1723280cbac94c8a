"""Training of the choice of block sizes: ``python -m bebop.adapt part=block_length`` (SPEC 5.3-5.6)."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bebop.adaptation.corpus import question_streams, run_engine
from bebop.adaptation.part_job import PartJob
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config import DecodingConfig
from bebop.config_adapt import AdaptConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.block_length import FEATURES, BlockLengthNetwork, PromptEnd
from bebop.model.checkpoint import load_policy
from bebop.options import BlockLengthTraining
from bebop.trainer.block_choice import Array, Evaluated, Sweep, evaluate, fit, goals, labels, score, split
from bebop.trajectory import Completion, Prompt

TIMED = 4  # prompts whose answers are timed alone, for the seconds that a cycle takes


class BlockLengthTrainer(PartJob):
    """Every prompt with every size, labels, training on three fifths of the prompts, comparison on the last fifth."""

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model with its block drafter."""
        super().__init__(config, folder, ranks)
        self.options = config.of(BlockLengthTraining)
        self.policy = load_policy(config.model, needs=("block",))
        self.sizes = tuple(range(self.options.smallest, self.options.largest + 1))

    def prepare(self) -> None:
        """A sweep goes on from the sizes that are finished."""

    def run(self) -> str:
        """All phases; what is to be said at the end."""
        asked, _ = question_streams(self.config, self.policy)
        prompts = [*{prompt.token_ids: prompt for prompt in asked}.values()]  # none is in two parts of ``split``
        sweep = self._sweep(prompts)
        seconds = self._seconds(prompts[:TIMED]) if self.options.label == "speed" else None
        settings, network, evaluated = self.train(sweep, seconds)
        results = evaluated.summary() | {
            "labels": np.bincount(labels(sweep, seconds), minlength=len(self.sizes)).tolist()
        }
        self.save(network, settings, results)
        lines = [f"{arm:16}{interval}" for arm, interval in evaluated.tau.items()]
        lines += [f"accuracy {evaluated.accuracy:.3f}, share of the oracle's gain {evaluated.share}"]
        return "\n".join([*lines, ""])

    # ---- what each size gives

    def _sweep(self, prompts: Sequence[Prompt]) -> Sweep:
        """Tokens and cycles of every prompt with every size; a size that a stopped run finished is read back."""
        tables = []
        for size in self.sizes:
            path = self.folder / f"sweep-{size}.json"
            if not (self.config.resume and path.is_file()):
                counts = self._counts(prompts, size)
                with writing(path):
                    path.write_text(json.dumps(counts) + "\n")
            tables.append(json.loads(path.read_text()))
        tokens, cycles = np.moveaxis(np.array(tables, float), 2, 0)
        features = FEATURES[self.options.features](prompt_ends(self.policy, prompts))
        return Sweep(sizes=self.sizes, tokens=tokens.T, cycles=cycles.T, features=features)

    def _counts(self, prompts: Sequence[Prompt], size: int) -> list[tuple[int, int]]:
        """Tokens and cycles of each prompt's answers, over all seeds; a block of one is plain decoding."""
        counts = np.zeros((len(prompts), 2), int)
        for seed in range(self.options.seeds):
            answers = self._answers(prompts, size, self.config.seed + seed, f"b = {size}")
            counts += np.array([(a.stats.emitted, a.stats.cycles) for a in answers])
        return [(int(tokens), int(cycles)) for tokens, cycles in counts]

    def _answers(
        self, prompts: Sequence[Prompt], size: int, seed: int, label: str | None, slots: int = 0
    ) -> list[Completion]:
        data = self.config.data if not slots else dataclasses.replace(self.config.data, slots=slots)
        sampling = dataclasses.replace(data.sampling, temperature=self.options.temperature)
        label = self.label(label) if label else None
        return run_engine(self.policy, prompts, data, system_of(size), seed, label, sampling=sampling)

    def _seconds(self, prompts: Sequence[Prompt]) -> Array:
        """Seconds of a cycle of each size [C], one answer at a time; sizes take turns, and the best of three counts."""
        seconds = np.full(len(self.sizes), np.inf)
        for _ in range(3):
            for i, size in enumerate(self.sizes):
                began = time.perf_counter()
                answers = self._answers(prompts, size, self.config.seed, None, slots=1)
                seconds[i] = min(seconds[i], (time.perf_counter() - began) / sum(a.stats.cycles for a in answers))
        return seconds

    # ---- training

    def train(self, sweep: Sweep, seconds: Array | None) -> tuple[dict[str, Any], BlockLengthNetwork, Evaluated]:
        """A network that has seen three fifths of the prompts, its settings, and its worth on the last fifth."""
        options, (first, _, last) = self.options, split(len(sweep.tau), self.config.seed)
        train, test, device = sweep.part(first), sweep.part(last), sweep.features.device
        fixed = int(score(train, seconds).mean(0).argmax())
        settings: dict[str, Any] = {
            "inputs": sweep.features.shape[1],
            "candidates": list(self.sizes),
            "default": self.sizes[fixed],
            "hidden": options.hidden,
            "features": options.features,
        }
        network = BlockLengthNetwork(**settings).to(device)
        wanted = goals(train, options.target, seconds).to(device)
        lengths = {"steps": options.steps, "batch": options.batch, "seed": self.config.seed}
        fit(network, train.features, wanted, lr=options.lr, **lengths)
        with torch.no_grad():
            chosen = network.sizes(test.features).cpu().numpy()
        return settings, network, evaluate(test, np.searchsorted(self.sizes, chosen), fixed, seconds)


def system_of(size: int) -> DecodingConfig:
    """Decoding with blocks of one size; a block of one is plain decoding."""
    if size == 1:
        return DecodingConfig(system="autoregressive", draft_tokens=0)
    return DecodingConfig(system="block", draft_tokens=size - 1)


@torch.no_grad()
def prompt_ends(policy: Policy, prompts: Sequence[Prompt]) -> PromptEnd:
    """What the target makes of each prompt, one at a time."""
    states = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids], device=policy.device)
        states.append(policy.hidden(ids, torch.arange(ids.shape[1], device=ids.device)[None], CausalContext())[0, -1])
    hidden = torch.stack(states)
    lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=policy.device)
    return PromptEnd(logits=policy.logits(hidden).float(), hidden=hidden.float(), lengths=lengths)


EntryClass = BlockLengthTrainer
