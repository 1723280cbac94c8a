"""Block drafts in SGLang: what a server is started with, what is refused, and MASK in weights that are sent."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from bebop.config.engines import SglangConfig
from bebop.config.job import DecodingConfig, JobConfig, ModelConfig, RolloutConfig
from bebop.errors import UserError
from bebop.model.checkpoint import save_policy
from bebop.rollout.served_weights import update
from bebop.rollout.sglang import builder
from bebop.rollout.sglang.arguments import HOSTED, refuse_server, refuse_system, server_arguments
from bebop.rollout.sglang.dflash import mask_of, refuse_drafter, with_mask
from bebop.systems.block.dflash import export
from tests.builders import letters, tiny_block, tiny_draft, tiny_policy

DECODING = DecodingConfig(system="block_target_only", draft_tokens=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and a drafter of blocks of four for it."""
    folder = tmp_path_factory.mktemp("dflash")
    policy = tiny_policy(16, layers=4)
    policy.tokenizer = letters(12)
    save_policy(policy, folder / "target")
    export(policy, tiny_block(2), folder / "drafter")
    change(folder / "target", model_type="qwen3")  # of tiny_policy's kind SGLang hands out no layers
    return folder


def change(folder: Path, **settings: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))


def settings(root: Path, **own: object) -> SglangConfig:
    return SglangConfig(draft=str(root / "drafter"), **own)  # type: ignore[arg-type]


def test_drafting_is_spelled_out(root: Path) -> None:
    arguments = server_arguments(JobConfig(decoding=DECODING), settings(root), root / "target", "cuda")
    assert {name: value for name, value in arguments.items() if name.startswith("speculative")} == {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(root / "drafter"),
        "speculative_num_draft_tokens": 4,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
    }


@pytest.mark.parametrize(
    ("system", "own", "device", "word"),
    [
        ("blockpilot", {}, "cuda", "DFLASH has one number of drafts for all requests of a server; choose one of"),
        ("block", {}, "cuda", "DFLASH drafts greedily; choose one of .*block_target_only"),
        ("block_target_only", {}, "cpu", "on a cpu: its DFLASH needs CUDA"),
        ("block_target_only", {"block_verification": True}, "cuda", "sampled drafts"),
        ("block_target_only", {"deterministic": True}, "cuda", "DFLASH draws from one generator"),
        ("pad", {}, "cuda", "choose one of"),
        ("ngram", {}, "cuda", "choose one of"),
        ("firp", {}, "cuda", "drafts come out of the target.s own passes, between whose layers .*; choose one of"),
        ("firp_chain", {}, "cpu", "drafts come out of the target.s own passes"),
    ],
)
def test_what_it_lacks(root: Path, system: str, own: dict[str, bool], device: str, word: str) -> None:
    with pytest.raises(UserError, match=word) as raised:
        refuse_system(DecodingConfig(system=system), settings(root, **own), device)
    assert "\n" not in str(raised.value)


@pytest.mark.slow
def test_a_separate_model_drafts_greedily(root: Path, tmp_path: Path) -> None:
    """STANDALONE, verified without distributions of drafts; sampled drafts are refused."""
    save_policy(tiny_draft(12, rows=16), tmp_path)
    model = ModelConfig(path=str(root / "target"), device="cpu", draft=str(tmp_path))
    decoding = DecodingConfig(system="draft_model", draft_tokens=3, draft_temperature=0.0)
    arguments = server_arguments(JobConfig(model=model, decoding=decoding), SglangConfig(), root / "target", "cuda")
    assert {name: value for name, value in arguments.items() if name.startswith("speculative")} == {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(tmp_path),
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 4,
        "speculative_use_rejection_sampling": False,
        "speculative_accept_threshold_single": 1.0,
        "speculative_accept_threshold_acc": 1.0,
    }
    refuse_server(arguments | {"version": "0.5.23"}, decoding, "in_place", "http://a")
    with pytest.raises(UserError, match=r"runs with speculative_num_steps=3; .*needs 2"):
        other = dataclasses.replace(decoding, draft_tokens=2)
        refuse_server(arguments | {"version": "0.5.23"}, other, "in_place", "http://a")
    with pytest.raises(UserError, match=r"draft_temperature=null is .* its STANDALONE drafts what is like"):
        refuse_system(dataclasses.replace(decoding, draft_temperature=None), SglangConfig(), "cuda")


def test_what_it_has(root: Path) -> None:
    refuse_system(DECODING, settings(root), "cuda")
    refuse_system(DECODING, settings(root, urls=("http://a:1",)), "cpu")  # the servers may have GPUs
    eagle3 = ["eagle3", "eagle3_target_only"]
    systems = ["autoregressive", "target_only", "bebop", "bebop_adaptive", "block_target_only", "draft_model", *eagle3]
    assert HOSTED == systems


@pytest.mark.parametrize(
    ("fault", "word"),
    [
        (
            lambda root: refuse_drafter(DECODING, SglangConfig(), root / "target"),
            r"needs rollout.sglang.draft .*export",
        ),
        (
            lambda root: refuse_drafter(DECODING, SglangConfig(draft=str(root / "target")), root / "target"),
            r"is not a drafter that python -m bebop.export wrote",
        ),
        (
            lambda root: refuse_drafter(dataclasses.replace(DECODING, draft_tokens=7), settings(root), root / "target"),
            r"draft_tokens=7 is not possible .* 4 slots, so decoding.draft_tokens=3",
        ),
    ],
)
def test_drafters_that_do_not_fit(root: Path, fault: Callable[[Path], None], word: str) -> None:
    refuse_drafter(DECODING, settings(root), root / "target")
    with pytest.raises(UserError, match=word):
        fault(root)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"model_type": "qwen2"}, "reads the layers of llama, qwen3, qwen3_moe models, this one is qwen2"),
        ({"hidden_size": 64}, "it is of a model with hidden_size 32, this one has 64"),
        ({"num_hidden_layers": 5}, "num_hidden_layers 4, this one has 5"),
    ],
)
def test_targets_that_do_not_fit(root: Path, tmp_path: Path, changes: dict[str, object], word: str) -> None:
    (tmp_path / "config.json").write_text((root / "target" / "config.json").read_text())
    change(tmp_path, **changes)
    with pytest.raises(UserError, match=word):
        refuse_drafter(DECODING, settings(root), tmp_path)


def test_a_job_is_checked_before_anything_starts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but the GPU is there; with one, nothing is left to be said."""
    monkeypatch.setattr(builder, "find_spec", lambda name: True)
    config = JobConfig(
        model=ModelConfig(path=str(root / "target"), device="cpu"),
        decoding=DECODING,
        rollout=RolloutConfig(engine="sglang", sglang=settings(root), max_length=500),
    )
    with pytest.raises(UserError, match="needs CUDA"):
        builder.check(config)
    monkeypatch.setattr(builder, "_device", lambda config: "cuda")
    builder.check(config)
    other = dataclasses.replace(config, rollout=RolloutConfig(engine="sglang", max_length=500))
    with pytest.raises(UserError, match=r"rollout\.sglang\.draft"):
        builder.check(other)


def test_servers(root: Path) -> None:
    server = {
        "version": "0.5.23", "speculative_algorithm": "DFLASH", "speculative_num_draft_tokens": 4,
        "speculative_accept_threshold_single": 1.0,
    }  # fmt: skip
    refuse_server(server, DECODING, "in_place", "http://a")
    for change in (
        {"speculative_algorithm": "EAGLE"},
        {"speculative_num_draft_tokens": 8},
        {"speculative_accept_threshold_single": 0.9},
    ):
        with pytest.raises(UserError, match=next(iter(change))):
            refuse_server(server | change, DECODING, "in_place", "http://a")
    with pytest.raises(UserError, match="speculative_algorithm"):
        refuse_server(server, DecodingConfig(), "in_place", "http://a")


def test_the_mask_stays_in_the_weights_that_are_sent(root: Path) -> None:
    mask = mask_of(settings(root))
    assert mask is not None and mask[0] == 12 and mask_of(SglangConfig()) is None
    table, other = torch.randn(16, 32), torch.randn(16, 32)
    weights = {"backbone.model.embed_tokens.weight": table, "backbone.lm_head.weight": other}
    sent = update(weights, 1, "mimo", 4, partial(with_mask, mask=mask)).target
    assert torch.equal(sent["model.embed_tokens.weight"][12], mask[1].float())
    rest = torch.arange(16) != 12
    assert torch.equal(sent["model.embed_tokens.weight"][rest], table[rest])
    assert sent["lm_head.weight"] is other
    assert not torch.equal(table[12], mask[1].float())  # the trainer's own is as it was
    assert with_mask({"lm_head.weight": other}, mask) == {"lm_head.weight": other}
