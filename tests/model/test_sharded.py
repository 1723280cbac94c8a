"""A backbone that ranks fill with their own rows is the one that is loaded whole; others are loaded whole."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh

from bebop.bench.update_memory import one_rank_group
from bebop.config.job import ModelConfig
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.sharded import _rows, fill, on_meta
from bebop.trainer.scorer import Scorer, shard, whole
from tests.model.families import made, refused
from tests.trainer.builders import policy


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    with one_rank_group():
        yield


def config(folder: Path, **settings: bool) -> ModelConfig:
    return ModelConfig(path=str(folder), device="cpu", dtype="float32", check=False, **settings)


@pytest.mark.parametrize("tied", [False, True])
def test_every_weight_is_that_of_the_whole_model(tied: bool, tmp_path: Path) -> None:
    save_policy(policy(tied=tied), tmp_path)
    made, wanted = load_policy(config(tmp_path), sharded=True), load_policy(config(tmp_path))
    assert on_meta(made.backbone) and not on_meta(wanted.backbone)
    scorer = Scorer(made, 1.0)
    shard(scorer, init_device_mesh("cpu", (1,)))
    fill(made.backbone, tmp_path, torch.device("cpu"))
    ours, theirs = made.weights(mtp=True), wanted.weights(mtp=True)
    assert ours.keys() == theirs.keys() and ("backbone.lm_head.weight" in ours) is not tied
    for name, tensor in theirs.items():
        assert torch.equal(whole(ours[name].detach()), tensor.detach()), name
    ids = torch.arange(9)[None]
    for one in (made, wanted):  # rotary frequencies are no parameters
        table = one.backbone.get_decoder().rotary_emb(torch.zeros(1), ids)
        assert table[0].shape[1] == 9 and torch.equal(
            table[0], wanted.backbone.get_decoder().rotary_emb(torch.zeros(1), ids)[0]
        )
    assert made.backbone.generation_config.to_dict() == wanted.backbone.generation_config.to_dict()
    assert made.stored == wanted.stored and made.layout == wanted.layout


def test_rows_of_a_rank_are_those_of_chunk() -> None:
    """Ranks at the end have fewer rows, or none."""
    for count in range(1, 10):
        for rank in range(4):
            mesh = SimpleNamespace(size=lambda: 4, get_local_rank=lambda rank=rank: rank)
            rows = range(count)[_rows(SimpleNamespace(shape=(count, 2), device_mesh=mesh))]  # type: ignore[arg-type]
            chunks = [chunk.tolist() for chunk in torch.arange(count).chunk(4)]
            assert list(rows) == [*chunks, [], [], []][rank]


def test_what_cannot_be_filled_is_loaded_whole(tmp_path: Path) -> None:
    """A fresh head starts from the last layer; a tied model's own output matrix stays untied."""
    own = policy()
    own.mtp = None
    save_policy(own, tmp_path / "bare")
    assert on_meta(load_policy(config(tmp_path / "bare"), sharded=True).backbone)
    assert not on_meta(load_policy(config(tmp_path / "bare", init_mtp=True), sharded=True).backbone)
    save_policy(policy(tied=True), tmp_path / "tied")
    weights = load_file(tmp_path / "tied" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"] + 1
    save_file(weights, tmp_path / "tied" / "model.safetensors", metadata={"format": "pt"})
    loaded = load_policy(config(tmp_path / "tied"), sharded=True).backbone
    assert not on_meta(loaded)
    assert not torch.equal(loaded.get_input_embeddings().weight, loaded.get_output_embeddings().weight)


@pytest.mark.slow
def test_a_model_of_wrong_logits_is_refused_although_ranks_could_fill_it(tmp_path: Path) -> None:
    """What its settings compute is compared in its place, on a random model of fewer layers."""
    save_policy(made("granite", logits_scaling=8.0), tmp_path / "wrong")
    wrong = ModelConfig(path=str(tmp_path / "wrong"), device="cpu")
    assert "packed rows" in refused(lambda: load_policy(wrong, any_backbone=True, sharded=True))
    save_policy(made("qwen3", num_hidden_layers=3), tmp_path / "right")
    state = torch.get_rng_state()
    assert on_meta(load_policy(ModelConfig(path=str(tmp_path / "right"), device="cpu"), sharded=True).backbone)
    assert torch.equal(torch.get_rng_state(), state)
