"""Adaptation whose head is trained on megatron-core; all else is ``bebop.adapt``."""

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM

from bebop.adaptation.corpus import from_file, split_rows
from bebop.adaptation.job import Adaptation
from bebop.adaptation.part_job import store
from bebop.adaptation.ranks import Ranks
from bebop.config.adapt import AdaptConfig
from bebop.errors import UserError
from bebop.megatron_job.architecture import BackboneModel, build, check_sizes
from bebop.megatron_job.backend import FrozenBackend, FrozenTrainer
from bebop.megatron_job.checkpoint import load_head, save_head
from bebop.megatron_job.parallel import ParallelConfig, Place
from bebop.megatron_job.source import Checkpoint
from bebop.megatron_job.weights import load
from bebop.model.backbone import Policy
from bebop.model.checkpoint import find_device, load_policy, load_tokenizer, save_policy
from bebop.run_dir.checkpoints import seal
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling, make_objective


class MegatronAdaptation(Adaptation):
    """One process of an adaptation; rank 0 writes. Checkpoints are distributed: any split reads them."""

    def __init__(self, config: AdaptConfig, parallel: ParallelConfig, folder: Path, place: Place) -> None:
        """Load this process's part of the model, and the whole model if held-out prompts are decoded."""
        make_objective(config.head.objective), make_objective(config.train.warm_objective)
        self.config, self.parallel, self.folder, self.place = config, parallel, folder, place
        self.ranks = Ranks(dist.get_rank(), dist.get_world_size())
        self.seconds: dict[str, float] = {}
        self.read = None
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        source = Checkpoint(config.model)
        check_sizes(source.config, parallel)
        self.check_rows()
        self.fresh = source.fresh
        self.policy = self._policy(source)
        self.sampling = Sampling.of(config.data.sampling)
        device, dtype = find_device(config.model), getattr(torch, config.model.dtype)
        model = build(source.config, parallel, place, dtype, device, BackboneModel)
        load(model, source, place, source.config.num_key_value_heads)
        self.backend = FrozenBackend(model, self.sampling, place, zero_first=source.zero_first)
        self.trainer = FrozenTrainer(self.backend, config.head)

    def check_rows(self) -> None:
        """Raise ``UserError`` unless every data parallel rank has a row of each step."""
        rows, datas = self.config.train.rows_per_step, self.place.datas
        if rows < datas:
            raise UserError(f"train.rows_per_step={rows} cannot be split over {datas} data parallel ranks: give more")

    def train_alone(self) -> dict[str, float]:
        """Train without decoding, on rows of a file, for models too large for one process.

        Returns:
            eval/overlap/1.. on held-out rows, before and after.
        """
        training, held_out = split_rows(self.config, from_file(self.config.data, self.policy))
        path = self.folder / "before.json"  # a resumed run begins with a trained head
        kept = json.loads(path.read_text()) if self.found is not None and path.is_file() else None
        before = self._progress(held_out) if kept is None else kept
        self.ranks.wait()  # until all have looked for the file
        if self.ranks.rank == 0 and kept is None:
            path.write_text(json.dumps(before) + "\n")
        self._train(training, held_out)
        after = self._progress(held_out)
        found = {f"before/{k}": v for k, v in before.items()} | {f"after/{k}": v for k, v in after.items()}
        weights = self.trainer.weights()
        if self.ranks.rank == 0:
            self._write_alone(weights, found)
        self.ranks.wait()
        return found

    # ---- what differs from the base

    def _policy(self, source: Checkpoint) -> Policy:
        """Return the whole model if it decodes, else only its tokenizer and its sizes."""
        if self.parallel.evaluate:
            return load_policy(dataclasses.replace(self.config.model, init_mtp=True))
        with torch.device("meta"):
            backbone = AutoModelForCausalLM.from_config(source.config)
        tokenizer = load_tokenizer(self.config.model)
        return Policy(backbone=backbone, tokenizer=tokenizer, mtp=None, layout=source.layout)

    def _states(self, rows: Sequence[TokenRow]) -> list[Tensor] | None:
        """Return the backbone's states of the training text if they fit and if a rank uses more rows than there are."""
        train, model = self.config.train, self.backend.model.config
        used = train.steps * train.rows_per_step / self.place.datas
        size = sum(len(row.token_ids) for row in rows) * model.hidden_size
        fits = size * model.params_dtype.itemsize <= train.cache_mb << 20
        return self.backend.backbone_states(rows) if fits and used > len(rows) else None

    def _progress(self, text: Sequence[TokenRow]) -> dict[str, float]:
        """Return the numbers of ``bebop.adapt`` with the whole model, else acceptance on the text by position."""
        if self.parallel.evaluate:
            return super()._progress(text)
        return self.backend.overlaps(text[:64], self.config.evaluation.draft_tokens)

    def _sync(self) -> None:
        if self.parallel.evaluate:
            super()._sync()

    def _load(self, path: Path) -> None:
        load_head(path, self.trainer)

    def _save(self) -> None:
        trainer, checkpoints = self.trainer, store(self.folder)
        place = self.ranks.union({self.ranks.rank: checkpoints.staging(trainer.version)})  # rank 0's name counts
        save_head(place[0], trainer)
        if self.ranks.rank == 0:
            seal(place[0])
            checkpoints.prune(self.config.train.keep, checkpoints.publish(place[0], trainer.version))
        self.ranks.wait()

    def _write_alone(self, weights: dict[str, Tensor], found: dict[str, Any]) -> None:
        """Write the numbers, and the checkpoint in its own layout; rank 0 holds the whole model in memory."""
        began = time.perf_counter()
        model = dataclasses.replace(self.config.model, init_mtp=True, device="cpu")
        policy = load_policy(model)
        assert policy.mtp is not None
        policy.load({f"mtp.{name}": x for name, x in weights.items()})  # a router's bias stays as it came
        save_policy(policy, Path(self.config.out or self.folder / "model"))
        self._clock("write", began)
        kept = {name: value for name, value in found.items() if math.isfinite(value)}
        (self.folder / "results.json").write_text(json.dumps({**kept, "seconds": self.seconds}, indent=2) + "\n")
