"""Training of a block drafter and of the choice of block sizes on the model's own completions (SPEC 5.1, 5.3-5.6).

``python -m bebop.adapt part=block`` trains the drafter, ``part=block_length`` the choice of a size.
"""

import copy
import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bebop.adaptation.corpus import (
    drafting_config,
    progress,
    question_streams,
    run_engine,
    sample_corpus,
    token_rows,
)
from bebop.adaptation.part_job import PartJob, StepJob
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config.adapt import AdaptConfig
from bebop.config.job import DecodingConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, mixed_precision, shared_tables
from bebop.model.checkpoint import load_policy
from bebop.systems.block.losses import (
    Array,
    Evaluated,
    ReadText,
    Sweep,
    accepted_drafts,
    block_loss,
    cycles,
    evaluate,
    fit,
    goals,
    labels,
    lay_out,
    read_texts,
    score,
    split,
)
from bebop.systems.block.network import FEATURES, BlockDraftNetwork, BlockLengthNetwork, PromptEnd, taps_of
from bebop.systems.block.options import BlockLengthTraining, BlockTraining
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trainer.objectives import Sampling
from bebop.trainer.optim import learning_rate
from bebop.trajectory import Completion, Prompt


class BlockTrainer(StepJob):
    """Training job: sample completions, measure the accept length, train, measure again, and write the part."""

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model and create a new network for it."""
        super().__init__(config, folder, ranks)
        self.options = config.of(BlockTraining)
        self.policy = load_policy(config.model)
        self.settings = settings_for(self.policy, self.options)
        self.network = BlockDraftNetwork(**self.settings).to(self.policy.device)
        self.policy.parts["block"] = self.network
        options = self.options
        self.optimise(self.network, "block drafter", lr=options.lr, steps=options.steps, warm_up=20)

    def run(self) -> str:
        """Run all remaining phases and return the final message."""
        decoding, label = drafting_config(self.policy), self.label("sample")
        _, rows, held_out = sample_corpus(self.config, self.policy, self.folder, decoding, label)
        before = self.first_look(lambda: self._accept_lengths(held_out, "before"))
        self._train(rows)
        results = {**before, **self._accept_lengths(held_out, "after")}
        self.save(copy.deepcopy(self.network).bfloat16(), self.settings, results)
        lines = [f"{name:40}{interval['value']:.3f}" for name, interval in results.items()]
        return "\n".join([*lines, ""])

    # ---- measuring

    def _accept_lengths(self, held_out: Sequence[Prompt], when: str) -> dict[str, Any]:
        """Return accept lengths of decoding with whole blocks, see ``lengths_by_temperature``."""
        # A copy: the engine converts it to the model's type, and training continues in fp32.
        self.policy.parts["block"] = copy.deepcopy(self.network).eval()
        decoding = DecodingConfig(system="block", draft_tokens=self.options.block - 1)
        return self.lengths_by_temperature(decoding, held_out, when)

    # ---- training

    def _train(self, rows: Sequence[TokenRow]) -> None:
        """Take all remaining steps, from the newest checkpoint on."""
        taps = self.network.taps
        texts = read_completions(self.policy, rows, taps) if self.fits(rows, taps) else None

        def next_step() -> dict[str, float]:
            chosen = rows_of_step(len(rows), self.options.rows_per_step, self.config.seed, self.version)
            own = [rows[i] for i in chosen]
            return self.update([texts[i] for i in chosen] if texts else read_completions(self.policy, own, taps))

        self.learn(self.options.steps, next_step)

    def update(self, texts: Sequence[ReadText]) -> dict[str, float]:
        """Take one optimizer step on random blocks of some texts; seed and step determine the anchors."""
        options, tables = self.options, shared_tables(self.policy)
        blocks = lay_out(texts, options.anchors, (self.config.seed << 32) + self.version)
        kind = "ce" if self.version < options.warm * options.steps else options.objective
        self.optimizer.zero_grad()
        with mixed_precision(self.policy):
            loss = block_loss(
                self.network,
                *tables,
                blocks,
                kind=kind,
                decay=options.decay,
                sampling=Sampling.of(self.config.data.sampling),
            )
        loss.backward()
        numbers = self.optimizer.guarded_step(learning_rate(self.rates, self.version))
        self.version += 1
        return {f"block/{name}": value for name, value in {"loss": float(loss.detach()), **numbers}.items()}


def read_completions(policy: Policy, rows: Sequence[TokenRow], taps: Sequence[int]) -> list[ReadText]:
    """Return some completions with the target's states, see ``read_texts``."""
    return read_texts(policy, [(row.token_ids, len(row.answer)) for row in rows], taps)


def settings_for(policy: Policy, options: BlockTraining) -> dict[str, Any]:
    """Return the settings of a network for a model: its width, heads, rotary base, and the tapped layers."""
    config = policy.backbone.config
    heads = config.num_attention_heads
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": options.width,
        "heads": heads,
        "kv_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "taps": taps_of(config.num_hidden_layers, options.taps),
        "layers": options.layers,
        "block": options.block,
        "norm_eps": config.rms_norm_eps,
        "rope_theta": (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0),
    }


# ---- the choice of a block size


TIMED = 4  # prompts whose completions are timed one at a time, for the seconds of a cycle


class BlockLengthTrainer(PartJob):
    """Training job: complete every prompt with every size, label, train on three fifths of the prompts, test on the
    last.
    """

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model with its block drafter."""
        super().__init__(config, folder, ranks)
        self.options = config.of(BlockLengthTraining)
        self.policy = load_policy(config.model, needs=("block",))
        self.sizes = tuple(range(self.options.smallest, self.options.largest + 1))
        self._greedy: list[TokenRow] = []
        self._texts: list[ReadText] = []  # of ``_greedy``, if they fit into memory

    def prepare(self) -> None:
        """Do nothing: a sweep resumes from its finished sizes."""

    def run(self) -> str:
        """Run all phases and return the final message."""
        prompts = self.prompts()
        sweep = self.sweep(prompts)
        seconds = self._seconds(prompts[:TIMED]) if self.options.label == "speed" else None
        settings, network, evaluated = self.train(sweep, seconds)
        results = evaluated.summary() | {
            "labels": np.bincount(labels(sweep, seconds), minlength=len(self.sizes)).tolist()
        }
        self.save(network, settings, results)
        lines = [f"{arm:16}{interval}" for arm, interval in evaluated.tau.items()]
        lines += [f"accuracy {evaluated.accuracy:.3f}, share of the oracle's gain {evaluated.share}"]
        return "\n".join([*lines, ""])

    # ---- results of each size

    def prompts(self) -> list[Prompt]:
        """Return the prompts without duplicates, so that none is in two parts of ``split``."""
        asked, _ = question_streams(self.config, self.policy)
        return [*{prompt.token_ids: prompt for prompt in asked}.values()]

    def sweep(self, prompts: Sequence[Prompt]) -> Sweep:
        """Return tokens and cycles of every prompt with every size; sizes that a stopped run finished are read from
        files.
        """
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
        """Return tokens and cycles of each prompt's completions over all seeds; a block of one is plain decoding.

        At temperature 0 all sizes give the same tokens, and drafts follow from the text before them. So completions are
        sampled once, and a size needs but one pass of the drafter over each. Logits that are nearly equal apart, the
        counts are those of decoding.
        """
        if self.options.temperature == 0:
            return self._read(prompts, size)
        counts = np.zeros((len(prompts), 2), int)
        for seed in range(self.options.seeds):
            answers = self._answers(prompts, size, self.config.seed + seed, f"b = {size}")
            counts += np.array([(a.stats.emitted, a.stats.cycles) for a in answers])
        return [(int(tokens), int(cycles)) for tokens, cycles in counts]

    def _read(self, prompts: Sequence[Prompt], size: int) -> list[tuple[int, int]]:
        """Return tokens and cycles of each prompt's greedy completion."""
        network = self.policy.parts["block"]
        assert isinstance(network, BlockDraftNetwork)
        network.to(self.policy.backbone.dtype)
        if not self._greedy:
            sampling = dataclasses.replace(self.config.data.sampling, temperature=0.0)
            decoding, label = drafting_config(self.policy), self.label("greedy")
            answers = run_engine(
                self.policy, prompts, self.config.data, decoding, self.config.seed, label, sampling=sampling
            )
            self._greedy = token_rows(prompts, answers)
            if self.fits(self._greedy, network.taps):
                self._texts = read_completions(self.policy, self._greedy, network.taps)
        counts = []
        with progress(len(prompts), self.label(f"b = {size}"), ALONE) as bar:
            for i, row in enumerate(self._greedy):
                text = self._texts[i] if self._texts else read_completions(self.policy, [row], network.taps)[0]
                accepted = accepted_drafts(self.policy, network, text, size) if size > 1 else [0] * text.answer
                counts.append((text.answer, cycles(accepted)))
                bar.update()
        return counts

    def _answers(
        self, prompts: Sequence[Prompt], size: int, seed: int, label: str | None, slots: int = 0
    ) -> list[Completion]:
        data = self.config.data if not slots else dataclasses.replace(self.config.data, slots=slots)
        sampling = dataclasses.replace(data.sampling, temperature=self.options.temperature)
        label = self.label(label) if label else None
        return run_engine(self.policy, prompts, data, system_of(size), seed, label, sampling=sampling)

    def _seconds(self, prompts: Sequence[Prompt]) -> Array:
        """Return the seconds of a cycle of each size [C], one completion at a time; sizes alternate, and the best of
        three counts.
        """
        seconds = np.full(len(self.sizes), np.inf)
        for _ in range(3):
            for i, size in enumerate(self.sizes):
                began = time.perf_counter()
                answers = self._answers(prompts, size, self.config.seed, None, slots=1)
                seconds[i] = min(seconds[i], (time.perf_counter() - began) / sum(a.stats.cycles for a in answers))
        return seconds

    # ---- training

    def train(self, sweep: Sweep, seconds: Array | None) -> tuple[dict[str, Any], BlockLengthNetwork, Evaluated]:
        """Train a network on three fifths of the prompts; return its settings, the network, and its results on the last
        fifth.
        """
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
    """Return the decoding configuration for blocks of one size; a block of one is plain decoding."""
    if size == 1:
        return DecodingConfig(system="autoregressive", draft_tokens=0)
    return DecodingConfig(system="block", draft_tokens=size - 1)


@torch.no_grad()
def prompt_ends(policy: Policy, prompts: Sequence[Prompt]) -> PromptEnd:
    """Return the target's output at the end of each prompt, computed one prompt at a time."""
    states = []
    for prompt in prompts:
        ids = torch.tensor([prompt.token_ids], device=policy.device)
        states.append(policy.hidden(ids, torch.arange(ids.shape[1], device=ids.device)[None], CausalContext())[0, -1])
    hidden = torch.stack(states)
    lengths = torch.tensor([len(prompt.token_ids) for prompt in prompts], device=policy.device)
    return PromptEnd(logits=policy.logits(hidden).float(), hidden=hidden.float(), lengths=lengths)
