"""What vLLM is started with, and what is refused before it starts."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bebop.config.engines import VLLM_OWN, VllmConfig
from bebop.config.job import (
    DecodingConfig,
    JobConfig,
    ModelConfig,
    MonitorConfig,
    RolloutConfig,
    SamplingConfig,
    TrainerConfig,
)
from bebop.errors import UserError
from bebop.model.checkpoint import named_as_served, resolve, save_policy
from bebop.rollout.served_weights import update
from bebop.rollout.vllm import builder
from bebop.rollout.vllm.arguments import (
    HOSTED,
    SPARE,
    engine_arguments,
    environment,
    model_runner,
    refuse_sampling,
    refuse_system,
    refuse_version,
    sampling_arguments,
)
from bebop.rollout.vllm.builder import check, weight_names
from bebop.rollout.vllm.transfer import MemoryTransfer
from bebop.systems.block.dflash import export
from bebop.trajectory import SamplingParams
from tests.builders import letters, tiny_block, tiny_draft, tiny_policy

TINY = resolve("tiny")


def job(system: str = "bebop", own: VllmConfig | None = None, drafts: int = 3, **rollout: Any) -> JobConfig:
    temperature = 0.0 if system == "history" else None
    decoding = DecodingConfig(system=system, draft_tokens=drafts, draft_temperature=temperature)
    return JobConfig(decoding=decoding, rollout=RolloutConfig(engine="vllm", vllm=own or VllmConfig(), **rollout))


@pytest.mark.parametrize(
    ("system", "wanted"),
    [
        ("bebop", {"method": "mtp", "num_speculative_tokens": 4, "draft_sample_method": "probabilistic"}),
        ("target_only", {"method": "mtp", "num_speculative_tokens": 4, "draft_sample_method": "greedy"}),
        ("ngram", {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}),
        (
            "history",
            {
                "method": "suffix",
                "num_speculative_tokens": 4,
                "suffix_decoding_max_tree_depth": 28,
                "suffix_decoding_max_cached_requests": 2147483647,
                "suffix_decoding_max_spec_factor": 4.0,
            },
        ),
        ("autoregressive", None),
    ],
)
def test_drafting_is_spelled_out(system: str, wanted: dict[str, Any] | None) -> None:
    assert engine_arguments(job(system, drafts=4), TINY, "cuda").get("speculative_config") == wanted


@pytest.mark.parametrize(("system", "how"), [("eagle3", "probabilistic"), ("eagle3_target_only", "greedy")])
def test_an_eagle3_drafter_is_named(system: str, how: str, tmp_path: Path) -> None:
    found = engine_arguments(job(system, drafts=4), TINY, "cuda", tmp_path)["speculative_config"]
    assert found == {
        "method": "eagle3", "num_speculative_tokens": 4, "draft_sample_method": how, "model": str(tmp_path)
    }  # fmt: skip


def test_settings_reach_their_arguments() -> None:
    own = VllmConfig(cache_bytes=900, memory_fraction=0.5, eager=True, extra={"max_num_batched_tokens": 77})
    config = job(own=own, slots=7, max_length=300, sampling=SamplingConfig(stop=("x",)))
    arguments = engine_arguments(config, TINY, "cuda")
    wanted = {
        "kv_cache_memory_bytes": 900, "gpu_memory_utilization": 0.5, "enforce_eager": True, "max_num_seqs": 7,
        "max_model_len": 304, "max_num_batched_tokens": 77, "logprobs_mode": "processed_logprobs",
        "async_scheduling": True, "weight_transfer_config": {"backend": "bebop"}, "dtype": "float32",
        "skip_tokenizer_init": False,
    }  # fmt: skip
    assert {name: arguments[name] for name in wanted} == wanted
    assert "block_size" not in arguments


def test_drafts_end_where_the_positions_of_the_model_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 300}))
    found = [engine_arguments(job(slots=7, max_length=n), tmp_path, "cuda")["max_model_len"] for n in (290, 298, 300)]
    assert found == [294, 300, 300]


def test_a_gpu_keeps_vllms_own_room_and_graphs() -> None:
    arguments = engine_arguments(job(), TINY, "cuda")
    assert arguments["kv_cache_memory_bytes"] is None and not arguments["enforce_eager"]
    assert "gpu_memory_utilization" not in arguments


def test_a_cpu_has_room_for_all_slots() -> None:
    """As a token of the tiny model's needs it in every layer, and the head is one more."""
    small, large = (engine_arguments(job(slots=n, max_length=400), TINY, "cpu") for n in (4, 8))
    assert small["enforce_eager"] and small["block_size"] == 32
    token = 2 * 4 * 2 * 32 * 13  # keys and values, float32, 2 heads of 32, 12 layers and the head
    more = large["kv_cache_memory_bytes"] - small["kv_cache_memory_bytes"]
    assert more == token * 416 * 4 * SPARE and small["kv_cache_memory_bytes"] > more  # 404 tokens, in blocks of 32
    assert not engine_arguments(job(own=VllmConfig(eager=False)), TINY, "cpu")["enforce_eager"]


def test_two_workers_draw_different_numbers() -> None:
    """Else completions of one prompt that are split between them would be equal."""
    assert engine_arguments(job(), TINY, "cuda")["seed"] != engine_arguments(job(), TINY, "cuda")["seed"]


def test_the_second_runner_is_taken_where_it_has_the_system() -> None:
    for system in set(HOSTED) - {"draft_model"}:
        assert model_runner(job(system), "cuda") == ("v1" if system == "history" else "v2")
        assert model_runner(job(system), "cpu") == "v1"  # it has kernels, the second runner an interpreter
    assert model_runner(job(own=VllmConfig(model_runner="v2")), "cpu") == "v2"
    for own, wanted in (({}, True), ({"async_scheduling": False}, False), ({"model_runner": "v1"}, False)):
        assert engine_arguments(job(own=VllmConfig(**own)), TINY, "cuda")["async_scheduling"] is wanted
    assert engine_arguments(job("ngram"), TINY, "cuda")["async_scheduling"] is False
    names = ("VLLM_USE_V2_MODEL_RUNNER", "BEBOP_VERIFY_EVERY", "BEBOP_VLLM_CPU")
    assert [environment("v2", "cpu", 4)[name] for name in names] == ["1", "4", "1"]
    assert [environment("v1", "cuda", 0)[name] for name in names] == ["0", "0", "0"]


def runner(system: str, device: str, **own: Any) -> Callable[[], Any]:
    return lambda: model_runner(job(system, VllmConfig(**own)), device)


def system(**decoding: Any) -> Callable[[], None]:
    return lambda: refuse_system(DecodingConfig(**decoding))


def settings(**own: Any) -> Callable[[], VllmConfig]:
    return lambda: VllmConfig(**own)


def sampling(speculative: bool, **params: float) -> Callable[[], None]:
    return lambda: refuse_sampling(SamplingParams(**params), speculative)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (system(system="bebop_adaptive"), "one number of drafts"),
        (system(system="bebop_tree"), "choose one of"),
        (system(system="firp"), "firp"),
        (system(system="pipo", draft_tokens=1), "choose one of"),
        (system(draft_temperature=0.5), "draft_temperature=0.5"),
        (system(draft_tokens="auto"), "draft_tokens=auto"),
        (system(draft_temperature="auto"), "draft_temperature=auto"),
        (system(draft_temperature=0.0), "target_only"),
        (system(system="history"), "draft_temperature=null .* likeliest; give 0"),
        (system(system="history", draft_temperature=0.5), "draft_temperature=0.5 .* likeliest; give 0"),
        (
            system(system="history", draft_temperature=0.0, options={"siblings": False}),
            "siblings=false is not possible with vLLM",
        ),
        (system(system="bebop_history"), "mixture of history and MTP head"),
        *((settings(extra={name: 1}), f"rollout.vllm.*{name}") for name in VLLM_OWN),
        (settings(model_runner="v3"), "rollout.vllm.*model_runner"),
        (settings(model_runner="v1", async_scheduling=True), "async_scheduling=True .*one step after"),
        (runner("history", "cuda", model_runner="v2"), "model_runner=v2 .*'history'.* give v1 or null"),
        (runner("history", "cuda", async_scheduling=True), "async_scheduling=true .* runner is v1"),
        (runner("ngram", "cuda", async_scheduling=True), "async_scheduling=true .*'ngram': .* give false or null"),
        (runner("bebop", "cpu", async_scheduling=True), "async_scheduling=true .* give false, or .*=v2"),
        (settings(transfer="file"), "rollout.vllm.*folder"),
        (settings(transfer="pigeon"), "rollout.vllm.*transfer"),
        (settings(folder=""), "rollout.vllm.*folder"),
        (settings(memory_fraction=1.5), "rollout.vllm.*memory_fraction"),
        (settings(memory_fraction=0.0), "rollout.vllm.*memory_fraction"),
        (settings(cache_bytes=0), "rollout.vllm.*cache_bytes"),
        (settings(monitor_every=-1), "rollout.vllm.*monitor_every"),
        (settings(timeout=0.0), "rollout.vllm.*timeout"),
        (sampling(False, temperature=0.001), "temperature=0.001"),
        (sampling(True, min_p=0.1), "min_p=0.1"),
        (sampling(False, min_p=0.1, top_p=0.9), "another distribution"),
        *((partial(refuse_version, old), r"0\.31") for old in ("0.30.2", "0.9", "dev", "")),
    ],
)
def test_what_vllm_cannot_do_is_refused(refused: Callable[[], Any], word: str) -> None:
    with pytest.raises(UserError, match=word) as caught:
        refused()
    assert "\n" not in str(caught.value)


def test_systems_that_it_has() -> None:
    of_their_own = {"draft_model", "block", "block_target_only", "eagle3", "eagle3_target_only"}  # weights
    assert set(HOSTED) == {"autoregressive", "target_only", "bebop", "ngram", "history"} | of_their_own
    for system in HOSTED:
        refuse_system(DecodingConfig(system=system, draft_temperature=0.0 if system == "history" else None))
    refuse_system(DecodingConfig(system="target_only", draft_temperature=0.0))


@pytest.mark.slow
def test_drafters_with_weights_of_their_own(tmp_path: Path) -> None:
    """A draft model with as many rows as the target; a drafter of this target, with blocks that are long enough."""
    policy = tiny_policy(16, layers=4)
    policy.tokenizer = letters(12)
    save_policy(policy, tmp_path / "target")
    export(policy, tiny_block(2), tmp_path / "drafter")
    for rows in (16, 17):
        save_policy(tiny_draft(12, rows=rows), tmp_path / f"draft{rows}")
    model, block = str(tmp_path / "draft16"), str(tmp_path / "drafter")

    def asked(system: str, drafts: int = 3, model: str | None = None, block: str | None = None) -> dict[str, Any]:
        config = JobConfig(
            model=ModelConfig(path=str(tmp_path / "target"), device="cpu", draft=model),
            decoding=DecodingConfig(system=system, draft_tokens=drafts),
            rollout=RolloutConfig(engine="vllm", vllm=VllmConfig(draft=block)),
        )
        return engine_arguments(config, tmp_path / "target", "cpu")

    common = {"num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    found, plain = asked("draft_model", model=model), asked("autoregressive")
    assert found["speculative_config"] == {"method": "draft_model", "model": model} | common
    # Keys and values of the target's four layers, one more as for a head, and the layer of the draft model.
    assert found["kv_cache_memory_bytes"] > 1.15 * plain["kv_cache_memory_bytes"]
    assert asked("block", block=block)["speculative_config"] == {"method": "dflash", "model": block} | common
    greedy = {"draft_sample_method": "greedy"}
    assert asked("block_target_only", block=block)["speculative_config"] == (
        {"method": "dflash", "model": block} | common | greedy
    )
    for refused, word in (
        (partial(asked, "draft_model", model=str(tmp_path / "draft17")), "its vocabulary has 17 rows, that of model"),
        (partial(asked, "block"), r"decoding.system=block needs rollout.vllm.draft with vLLM"),
        (partial(asked, "block", block=model), "is not a drafter that python -m bebop.export wrote"),
        (partial(asked, "block", drafts=4, block=block), "blocks have 4 slots, so give 1 to 3"),
    ):
        with pytest.raises(UserError, match=word):
            refused()


def test_versions_and_distributions_that_it_takes() -> None:
    for version in ("0.31.0", "0.31.0+cpu", "0.32.1rc1", "1.0"):
        refuse_version(version)
    refuse_sampling(SamplingParams(temperature=0.0), True)
    refuse_sampling(SamplingParams(temperature=0.01, top_p=0.9, top_k=5, repetition_penalty=1.1), True)
    refuse_sampling(SamplingParams(min_p=0.1), False)


def test_sampling_arguments() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=5, stop_token_ids=(1, 3), stop=("\n",), seed=5)
    arguments = sampling_arguments(params, 9)
    wanted = {
        "temperature": 0.7, "top_p": 0.9, "top_k": 5, "max_tokens": 9, "stop_token_ids": [1, 3], "ignore_eos": True,
        "stop": ["\n"], "include_stop_str_in_output": True, "detokenize": True, "logprobs": 0,
    }  # fmt: skip
    assert {name: arguments[name] for name in wanted} == wanted
    assert "seed" not in arguments
    bare = sampling_arguments(SamplingParams(), 9)
    assert bare["top_k"] == 0 and not bare["detokenize"] and "stop" not in bare


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main environment has no vLLM; what is checked here needs none."""
    monkeypatch.setattr(builder, "find_spec", lambda name: True)


def test_a_job_is_checked_before_anything_starts(installed: None) -> None:
    check(job())
    with pytest.raises(UserError, match=r"monitor\.actions"):
        check(dataclasses.replace(job(), monitor=MonitorConfig(actions=True)))
    replayed = dataclasses.replace(job(own=VllmConfig(model_runner="v1")), trainer=TrainerConfig(routing_replay=True))
    with pytest.raises(UserError, match=r"trainer\.routing_replay=True is not possible with vLLM's first model runner"):
        check(replayed)
    recomputed = dataclasses.replace(job(on_update="recompute"), trainer=TrainerConfig(routing_replay=True))
    with pytest.raises(UserError, match=r"on_update=recompute on vLLM: .* routing.*give rollout.on_update=keep"):
        check(recomputed)
    check(job(on_update="recompute"))
    with pytest.raises(UserError, match=r"temperature=0\.005"):
        check(job(sampling=SamplingConfig(temperature=0.005)))
    with pytest.raises(UserError, match="one number of drafts"):
        check(job("bebop_adaptive"))


def test_a_checkpoint_without_a_head_drafts_nothing(installed: None, tmp_path: Path) -> None:
    shutil.copy(TINY / "config.json", tmp_path)
    target = weight_names(TINY, "mimo", 12)["target"]
    weights = {name: t for file in TINY.glob("*.safetensors") for name, t in load_file(file).items() if name in target}
    save_file(weights, tmp_path / "model.safetensors")
    bare = ModelConfig(path=str(tmp_path))
    check(dataclasses.replace(job("autoregressive"), model=bare))
    with pytest.raises(UserError, match=r"has no MTP weights.*bebop\.adapt"):
        check(dataclasses.replace(job(), model=bare))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors")


def test_a_tied_checkpoint_may_hold_its_head_again(installed: None, tmp_path: Path) -> None:
    """Qwen3-0.6B does. Updates hold a shared weight once, and no tables of positions, which old checkpoints have."""
    policy = tiny_policy(16, layers=1, with_parts=False)
    policy.tokenizer = letters(12)
    save_policy(policy, tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    rewrite(tmp_path, lambda held: held | {"lm_head.weight": held["model.embed_tokens.weight"].clone()} | more)
    check(dataclasses.replace(job(), model=ModelConfig(path=str(tmp_path))))
    transfer = MemoryTransfer(weight_names(tmp_path, "mimo", 1))
    weights = {name: t for name, t in policy.weights(mtp=True).items() if name != "backbone.lm_head.weight"}
    rename = partial(named_as_served, tmp_path)
    transfer.refuse(update(weights, 0, "mimo", 1, rename))
    del weights["backbone.model.embed_tokens.weight"]
    with pytest.raises(UserError, match=r"lacks 'model\.embed_tokens\.weight'"):
        transfer.refuse(update(weights, 0, "mimo", 1, rename))
    assert "lm_head.weight" in weight_names(TINY, "mimo", 12)["target"], "of a model that does not tie it"


def test_a_language_model_inside_another_is_refused(installed: None, tmp_path: Path) -> None:
    """Qwen3.5 is published so: ``model.language_model.layers.0...``. vLLM would end when the first version came."""
    policy = tiny_policy(16, layers=1, with_parts=False)
    policy.tokenizer = letters(12)
    save_policy(policy, tmp_path)
    config = dataclasses.replace(job("autoregressive"), model=ModelConfig(path=str(tmp_path)))
    check(config)
    rewrite(tmp_path, lambda held: {name.replace("model.", "model.language_model."): t for name, t in held.items()})
    with pytest.raises(UserError, match=r"'model\.language_model\..* save it alone, or use rollout=sglang") as caught:
        check(config)
    assert "\n" not in str(caught.value)


def test_suffix_decoding_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "find_spec", lambda name: None if name == "arctic_inference" else True)
    check(job("ngram"))
    with pytest.raises(UserError, match=r"'history' with vLLM needs arctic-inference: pip install") as caught:
        check(job("history"))
    assert "\n" not in str(caught.value)


def test_vllm_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install -e '.\[vllm\]'"):
        check(job())


def test_weights_by_role() -> None:
    names = weight_names(TINY, "mimo", 12)
    assert {name.split(".")[1] for name in names["draft"]} == {"mtp_layers"}
    assert "model.embed_tokens.weight" in names["target"] and not names["target"] & names["draft"]
    assert weight_names(TINY, None, 12) == {"target": names["target"] | names["draft"], "draft": set()}
