import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.parity import stock_attention
from bebop.run_dir import state_codec as codec
from bebop.trainer.checkpoint import load, store
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.rank import TrainerRank
from tests.cases import slow_but
from tests.trainer.builders import batch, job, policy, weights_of


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    save_policy(policy(), folder)
    return str(folder)


@pytest.fixture(scope="module")
def two_steps(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints of steps 1 and 2, which tests copy before they damage it."""
    run: Path = tmp_path_factory.mktemp("two_steps")
    for step in (1, 2):
        written(run, step, model)
    return run


def written(run: Path, step: int, model: str) -> Path:
    """As ``RayTrainer.save`` does it."""
    staged = store(run).staging(step)
    TrainerRank(job(model)).save(staged, {"cursor": step})
    return store(run).publish(staged, step)


def learned(worker: TrainerRank, seeds: list[int]) -> TrainerRank:
    for seed in seeds:
        worker.update(batch(seed=seed))
    return worker


def everything(worker: TrainerRank) -> dict[str, Tensor]:
    state = worker.trainer.state_dict()
    return {**state["weights"], **state["optimizer"], "rng": torch.get_rng_state()}


@pytest.mark.parametrize(
    ("dtype", "rank"),
    slow_but(
        [("bfloat16", 0), ("float32", 2)], [(d, rank) for d in ("float32", "bfloat16") for rank in (0, 2)], several=True
    ),
)
def test_three_updates_equal_one_and_resume_and_two_bit_for_bit(
    tmp_path: Path, model: str, dtype: str, rank: int
) -> None:
    """``rank``: of an adapter that is trained in place of all weights."""
    kept = {"path": model, "device": "cpu", "dtype": dtype}
    config = job(model, model=kept, algorithm={"kl_coefficient": 0.1}, trainer={"lora": {"rank": rank}})
    straight = learned(TrainerRank(config), [1, 2, 3])
    wanted = everything(straight)
    folder = store(tmp_path).path(1)
    learned(TrainerRank(config), [1]).save(folder, {"cursor": 4, "groups": batch().groups})
    resumed = TrainerRank(config)
    loop = resumed.load(folder)
    assert resumed.version() == 1
    assert loop["cursor"] == 4 and len(loop["groups"]) == 4
    got = everything(learned(resumed, [2, 3]))
    assert list(got) == list(wanted)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    without_moments = TrainerRank(config)
    without_moments.load(folder)
    without_moments.trainer.optimizer.state.clear()
    broken = everything(learned(without_moments, [2, 3]))
    assert not all(torch.equal(broken[name], wanted[name]) for name in wanted)


def test_the_policy_in_a_checkpoint_is_the_trained_one_and_transformers_reads_it(tmp_path: Path, model: str) -> None:
    worker = learned(TrainerRank(job(model)), [1])
    worker.save(store(tmp_path).path(1), {})
    folder = store(tmp_path).path(1) / "policy"
    again = weights_of(load_policy(ModelConfig(path=str(folder), device="cpu")))
    wanted = worker.weights(mtp=True).weights
    assert list(again) == list(wanted)
    assert all(torch.equal(again[name], wanted[name]) for name in wanted)
    stock = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(stock.lm_head.weight, wanted["backbone.lm_head.weight"])


def test_a_tied_head_is_saved_once_and_tied_again(tmp_path: Path) -> None:
    trainer = PolicyTrainer(policy(tied=True), job())
    trainer.update(batch(seed=1))
    save_policy(trainer.policy, tmp_path, weights=trainer.state_dict()["weights"])
    again = load_policy(ModelConfig(path=str(tmp_path), device="cpu")).backbone
    assert again.lm_head.weight is again.get_input_embeddings().weight
    assert torch.equal(again.lm_head.weight, trainer.weights()["backbone.model.embed_tokens.weight"])


@torch.no_grad()
def test_a_head_of_its_own_is_kept_where_the_config_says_tied(tmp_path: Path) -> None:
    source, folder = tmp_path / "model", tmp_path / "step"
    save_policy(policy(tied=True), source)
    state = load_file(source / "model.safetensors")
    own = {"lm_head.weight": torch.randn_like(state["model.embed_tokens.weight"])}
    save_file(state | own, source / "model.safetensors", metadata={"format": "pt"})
    worker = TrainerRank(job(str(source)))
    with torch.enable_grad():
        learned(worker, [1]).save(folder, {})
    stock = AutoModelForCausalLM.from_pretrained(folder / "policy", attn_implementation="eager")
    assert stock.config.tie_word_embeddings is False  # engines that load it go by that
    ids = torch.arange(9)[None]
    with stock_attention(worker.trainer.policy.backbone):
        assert torch.equal(stock(input_ids=ids).logits, worker.trainer.policy.backbone(input_ids=ids).logits)


@pytest.mark.parametrize(
    "name", ["trainer.json", "trainer.safetensors", "loop.json", "loop.safetensors", "policy/model.safetensors"]
)
def test_a_flipped_byte_is_found_and_named(tmp_path: Path, two_steps: Path, name: str) -> None:
    run = shutil.copytree(two_steps, tmp_path / "run")
    old, new = store(run).path(1), store(run).path(2)
    content = bytearray((new / name).read_bytes())
    content[len(content) // 2] ^= 1
    (new / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as caught:
        load(new)
    assert "\n" not in str(caught.value)
    assert load(old).loop == {"cursor": 1}


@pytest.mark.parametrize("name", ["trainer.safetensors", "loop.json", "manifest.json"])
def test_a_missing_file_is_named(tmp_path: Path, two_steps: Path, name: str) -> None:
    folder = store(shutil.copytree(two_steps, tmp_path / "run")).path(1)
    (folder / name).unlink()
    with pytest.raises(UserError, match=f"{name} is missing"):
        load(folder)


def test_a_broken_manifest_and_an_unknown_format_are_named(tmp_path: Path, two_steps: Path) -> None:
    folder = store(shutil.copytree(two_steps, tmp_path / "run")).path(1)
    manifest = folder / "manifest.json"
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps(content | {"format": 99}))
    with pytest.raises(UserError, match="format 99"):
        load(folder)
    manifest.write_text("{")
    with pytest.raises(UserError, match=r"manifest.json is corrupt"):
        load(folder)


def test_a_writer_that_dies_half_way_leaves_the_older_checkpoint_in_force(tmp_path: Path, model: str) -> None:
    first = written(tmp_path, 1, model)
    with pytest.raises(TypeError, match="/no state is a function, which no checkpoint can keep"):
        TrainerRank(job(model)).save(store(tmp_path).staging(2), {"no state": lambda: 0})
    (partial,) = set((tmp_path / "checkpoints").iterdir()) - {first}
    assert (partial / "policy" / "model.safetensors").is_file(), "it got half way"
    assert store(tmp_path).newest_sound() == first
    second = written(tmp_path, 2, model)
    assert store(tmp_path).newest_sound() == second and load(second).loop == {"cursor": 2}


def test_a_checkpoint_of_another_model_is_refused(two_steps: Path, model: str) -> None:
    folder = store(two_steps).path(1)
    content = codec.load(folder / "trainer")
    content["weights"]["backbone.lm_head.weight"] = torch.zeros(3, 32)
    with pytest.raises(UserError, match=r"lm_head.weight has shape \(3, 32\), the model needs \(64, 32\)"):
        TrainerRank(job(model)).trainer.load_state_dict(content)


# ---- Which checkpoint is the newest when step numbers outgrow their six digits


def test_step_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    kept = store(tmp_path)
    older, newer = kept.path(999_999), kept.path(1_000_000)
    assert newer.name < older.name
    for folder in (newer, older):
        folder.mkdir(parents=True)
    assert kept.all() == [older, newer]
