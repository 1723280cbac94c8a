"""Training of a block drafter on answers of the model itself: ``python -m bebop.adapt part=block`` (SPEC 5.1)."""

import copy
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop.adaptation.corpus import drafting_config, run_engine, sample_corpus
from bebop.adaptation.evaluation import measured
from bebop.adaptation.part_job import StepJob
from bebop.adaptation.ranks import ALONE, Ranks
from bebop.command import writing
from bebop.config import DecodingConfig
from bebop.config_adapt import AdaptConfig
from bebop.model.backbone import Policy
from bebop.model.block import BlockDraftNetwork, taps_of
from bebop.model.checkpoint import load_policy
from bebop.options import BlockTraining
from bebop.trainer.block_loss import ReadText, block_loss, lay_out, read_texts, shared_tables
from bebop.trainer.chains import TokenRow, rows_of_step
from bebop.trainer.optim import learning_rate
from bebop.trajectory import Prompt

GREEDY = 0.0


class BlockTrainer(StepJob):
    """Answers, accept length before, training, accept length after, and the part."""

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks = ALONE) -> None:
        """Load the model and make a fresh network for it."""
        super().__init__(config, folder, ranks)
        self.options = config.of(BlockTraining)
        self.policy = load_policy(config.model)
        self.settings = settings_for(self.policy, self.options)
        self.network = BlockDraftNetwork(**self.settings).to(self.policy.device)
        self.policy.parts["block"] = self.network
        options = self.options
        self.optimise(self.network, "block drafter", lr=options.lr, steps=options.steps, warm_up=20)

    def run(self) -> str:
        """All phases that are left; what is to be said at the end."""
        decoding, label = drafting_config(self.policy), self.label("sample")
        _, rows, held_out = sample_corpus(self.config, self.policy, self.folder, decoding, label)
        before = self._first_look(held_out)
        self._train(rows)
        results = {**before, **self._accept_lengths(held_out, "after")}
        self.save(copy.deepcopy(self.network).bfloat16(), self.settings, results)
        lines = [f"{name:40}{interval['value']:.3f}" for name, interval in results.items()]
        return "\n".join([*lines, ""])

    # ---- measuring

    def _first_look(self, held_out: Sequence[Prompt]) -> dict[str, Any]:
        """Accept lengths of the network before its first step, which are kept for a resume."""
        path = self.folder / "before.json"
        if not (self.config.resume and path.is_file()):
            found = self._accept_lengths(held_out, "before")
            with writing(path):
                path.write_text(json.dumps(found) + "\n")
        read_again: dict[str, Any] = json.loads(path.read_text())
        return read_again

    def _accept_lengths(self, held_out: Sequence[Prompt], when: str) -> dict[str, Any]:
        """Decoding with whole blocks, at the temperature of the data and at 0: intervals by name."""
        drafts, data = self.options.block - 1, self.config.data
        decoding, tasks = DecodingConfig(system="block", draft_tokens=drafts), [p.task for p in held_out]
        found = {}
        self.network.eval()
        for name, temperature in (("sampled", data.sampling.temperature), ("greedy", GREEDY)):
            sampling, label = dataclasses.replace(data.sampling, temperature=temperature), f"{when}: {name}"
            answers = run_engine(
                self.policy, held_out, data, decoding, self.config.seed + 1, self.label(label), sampling=sampling
            )
            interval = measured(tasks, answers, drafts).interval("accept_length")
            found[f"accept_length/{name}/{when}"] = dataclasses.asdict(interval)
        self.network.train()
        return found

    # ---- training

    def _train(self, rows: Sequence[TokenRow]) -> None:
        """Every step to the last, from the newest checkpoint on."""
        texts = read_texts(self.policy, [(row.token_ids, len(row.answer)) for row in rows], self.network.taps)

        def next_step() -> dict[str, float]:
            chosen = rows_of_step(len(texts), self.options.rows_per_step, self.config.seed, self.version)
            return self.update([texts[i] for i in chosen])

        self.learn(self.options.steps, next_step)

    def update(self, texts: Sequence[ReadText]) -> dict[str, float]:
        """One optimizer step on random blocks of some texts; the anchors follow from the seed and the step."""
        options, tables = self.options, shared_tables(self.policy)
        blocks = lay_out(texts, options.anchors, (self.config.seed << 32) + self.version)
        kind = "ce" if self.version < options.warm * options.steps else options.objective
        self.optimizer.zero_grad()
        loss = block_loss(
            self.network, *tables, blocks, kind=kind, decay=options.decay,
            temperature=self.config.data.sampling.temperature,
        )  # fmt: skip
        loss.backward()
        numbers = self.optimizer.guarded_step(learning_rate(self.rates, self.version))
        self.version += 1
        return {f"block/{name}": value for name, value in {"loss": float(loss.detach()), **numbers}.items()}


def settings_for(policy: Policy, options: BlockTraining) -> dict[str, Any]:
    """The settings of a network for a model: its width, heads and base of positions, and the layers that are tapped."""
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


EntryClass = BlockTrainer
