"""What SGLang is started with, and what is refused before it starts."""

import dataclasses
import json
from pathlib import Path

import pytest

from bebop.config import AlgorithmConfig, DecodingConfig, JobConfig, MonitorConfig, RolloutConfig
from bebop.config_engines import SglangConfig
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from bebop.rollout.sglang import builder
from bebop.rollout.sglang.arguments import (
    pause_mode,
    refuse_sampling,
    refuse_server,
    refuse_system,
    refuse_version,
    refuse_vocabulary,
    sampling_arguments,
    server_arguments,
)
from bebop.rollout.sglang.builder import check
from bebop.trajectory import SamplingParams

TINY = resolve("tiny")


def job(system: str = "bebop", **decoding: object) -> JobConfig:
    return JobConfig(decoding=DecodingConfig(system=system, **decoding))  # type: ignore[arg-type]


@pytest.mark.parametrize(("system", "rejection"), [("bebop", True), ("bebop_adaptive", True), ("target_only", False)])
def test_drafting_is_spelled_out(system: str, rejection: bool) -> None:
    arguments = server_arguments(job(system, draft_tokens=4), SglangConfig(), TINY, "cuda")
    assert arguments["speculative_algorithm"] == "NEXTN"
    assert arguments["speculative_num_steps"] == 4
    assert arguments["speculative_eagle_topk"] == 1
    assert arguments["speculative_num_draft_tokens"] == 5
    assert arguments["speculative_use_rejection_sampling"] is rejection
    assert arguments["speculative_draft_model_path"] == arguments["model_path"] == str(TINY)
    assert arguments.get("speculative_adaptive", False) is (system == "bebop_adaptive")


def test_plain_decoding_has_no_drafts() -> None:
    arguments = server_arguments(job("autoregressive"), SglangConfig(), TINY, "cuda")
    assert not [name for name in arguments if name.startswith("speculative")]


def test_settings_reach_their_arguments() -> None:
    own = SglangConfig(
        tensor_parallel=2, memory_fraction=0.5, cache_tokens=900, deterministic=True, colocated=True,
        block_verification=True, attention_backend="fa3", extra={"chunked_prefill_size": 64, "log_level": "info"},
    )  # fmt: skip
    config = dataclasses.replace(job(), rollout=RolloutConfig(slots=7, max_length=300))
    arguments = server_arguments(config, own, TINY, "cuda")
    wanted = {
        "tp_size": 2, "mem_fraction_static": 0.5, "max_total_tokens": 900, "enable_deterministic_inference": True,
        "enable_memory_saver": True, "enable_draft_weights_cpu_backup": True, "attention_backend": "fa3",
        "speculative_use_block_verification": True, "max_running_requests": 7, "context_length": 304,
        "chunked_prefill_size": 64, "log_level": "info", "weight_version": "0",
    }  # fmt: skip
    assert {name: arguments[name] for name in wanted} == wanted
    assert "device" not in arguments


def test_a_cpu_takes_what_it_can_run() -> None:
    arguments = server_arguments(job(), SglangConfig(), TINY, "cpu")
    assert (arguments["device"], arguments["attention_backend"]) == ("cpu", "triton")
    arguments = server_arguments(job(), SglangConfig(attention_backend="torch_native"), TINY, "cpu")
    assert arguments["attention_backend"] == "torch_native"


@pytest.mark.parametrize(
    ("decoding", "own", "device", "word"),
    [
        (DecodingConfig(draft_temperature=0.5), SglangConfig(), "cuda", "draft_temperature"),
        (DecodingConfig(draft_tokens="auto"), SglangConfig(), "cuda", "draft_tokens=auto"),
        (DecodingConfig(draft_temperature="auto"), SglangConfig(), "cuda", "draft_temperature=auto"),
        (DecodingConfig(draft_temperature=0.0), SglangConfig(), "cuda", "target_only"),
        (DecodingConfig(), SglangConfig(block_verification=True), "cpu", "GPU"),
        (DecodingConfig(system="target_only"), SglangConfig(block_verification=True), "cuda", "sampled drafts"),
        (DecodingConfig(), SglangConfig(deterministic=True), "cpu", "deterministic"),
    ],
)
def test_systems_that_sglang_lacks(decoding: DecodingConfig, own: SglangConfig, device: str, word: str) -> None:
    with pytest.raises(UserError, match=word):
        refuse_system(decoding, own, device)


def test_systems_that_it_has() -> None:
    for system in ("autoregressive", "target_only", "bebop", "bebop_adaptive"):
        refuse_system(DecodingConfig(system=system), SglangConfig(), "cpu")
    refuse_system(DecodingConfig(system="target_only", draft_temperature=0.0), SglangConfig(), "cpu")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"extra": {"speculative_eagle_topk": 4}}, "speculative_eagle_topk"),
        ({"extra": {"speculative_token_map": "hot.pt"}}, "speculative_token_map"),
        ({"data_parallel": 2}, "data_parallel"),
        ({"transfer": "disk"}, "folder"),
        ({"transfer": "pigeon"}, "transfer"),
        ({"pause": "wait"}, "pause"),
        ({"urls": ("localhost:30000",)}, "urls"),
        ({"memory_fraction": 1.5}, "memory_fraction"),
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"monitor_every": -1}, "monitor_every"),
        ({"timeout": 0.0}, "timeout"),
    ],
)
def test_settings_that_cannot_be(settings: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        SglangConfig(**settings)


@pytest.mark.parametrize(
    ("sampling", "speculative", "rescored", "word"),
    [
        ({"repetition_penalty": 1.1}, True, True, "repetition_penalty"),
        ({"repetition_penalty": 1.1}, False, True, "repetition_penalty"),
        ({"min_p": 0.1}, True, True, "min_p"),
        ({"top_p": 0.9}, True, False, "rescore"),
        ({"top_k": 5}, False, False, "rescore"),
    ],
)
def test_sampling_that_it_would_not_follow(sampling: dict, speculative: bool, rescored: bool, word: str) -> None:
    with pytest.raises(UserError, match=word):
        refuse_sampling(SamplingParams(**sampling), speculative, rescored)


def test_distributions_that_it_samples_from() -> None:
    refuse_sampling(SamplingParams(temperature=0.7), True, False)
    refuse_sampling(SamplingParams(top_p=0.9, top_k=5), True, True)
    refuse_sampling(SamplingParams(min_p=0.1), False, True)


def test_versions() -> None:
    for version in ("0.5.14", "0.5.23", "0.5.14.post1", "0.6.0rc1", "1.0"):
        refuse_version(version)
    for version in ("0.5.13", "0.5.12.post2", "0.4.99", ""):
        with pytest.raises(UserError, match=r"0\.5\.14"):
            refuse_version(version)


def test_a_draft_vocabulary_that_differs(tmp_path: Path) -> None:
    for settings in ({"vocab_size": 100}, {"vocab_size": 100, "draft_vocab_size": 100}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        refuse_vocabulary(tmp_path)
    fewer = {"vocab_size": 100, "draft_vocab_size": 32}
    for settings in (fewer, {"text_config": fewer}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match="of 100 tokens"):
            refuse_vocabulary(tmp_path)


SERVER = {
    "version": "0.5.23", "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_use_rejection_sampling": True, "speculative_accept_threshold_single": 1.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "system"),
    [
        ({"version": "0.5.12"}, "bebop"),
        ({"speculative_algorithm": None}, "bebop"),
        ({"speculative_algorithm": "NGRAM"}, "bebop"),
        ({"speculative_eagle_topk": 4}, "bebop"),
        ({"speculative_use_rejection_sampling": False}, "bebop"),
        ({}, "target_only"),
        ({}, "autoregressive"),
        ({"speculative_num_steps": 2}, "bebop"),
        ({"speculative_accept_threshold_single": 0.9}, "bebop"),
    ],
)
def test_servers_that_decode_otherwise(change: dict, system: str) -> None:
    with pytest.raises(UserError):
        refuse_server(SERVER | change, DecodingConfig(system=system), "http://a")


def test_servers_that_decode_as_wanted() -> None:
    refuse_server(SERVER, DecodingConfig(), "http://a")
    refuse_server(SERVER | {"speculative_num_steps": 7}, DecodingConfig(system="bebop_adaptive"), "http://a")
    greedy = SERVER | {"speculative_use_rejection_sampling": False}
    refuse_server(greedy, DecodingConfig(system="target_only"), "http://a")
    plain = {"version": "0.5.23", "speculative_algorithm": None}
    refuse_server(plain, DecodingConfig(system="autoregressive"), "http://a")


def test_pauses() -> None:
    assert pause_mode(SglangConfig(), "keep") == "in_place"
    assert pause_mode(SglangConfig(), "recompute") == "retract"
    assert pause_mode(SglangConfig(pause="abort"), "keep") == "abort"


def test_sampling_arguments() -> None:
    params = SamplingParams(temperature=0.7, stop_token_ids=(1, 3), stop=("\n",), seed=(1 << 40) + 5)
    arguments = sampling_arguments(params, 9, seeded=True)
    assert arguments["max_new_tokens"] == 9 and arguments["temperature"] == 0.7
    assert arguments["top_k"] == -1 and arguments["stop"] == ["\n"]
    assert arguments["stop_token_ids"] == [1, 3] and arguments["ignore_eos"] is False
    assert arguments["sampling_seed"] == 5
    bare = sampling_arguments(SamplingParams(), 9, seeded=False)
    assert bare["ignore_eos"] is True and "sampling_seed" not in bare and "stop" not in bare


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main environment has no SGLang; what is checked here needs none."""
    monkeypatch.setattr(builder, "find_spec", lambda name: True)


def test_a_job_is_checked_before_anything_starts(installed: None) -> None:
    check(job())
    sampling = dataclasses.replace(RolloutConfig().sampling, min_p=0.1)
    config = JobConfig(rollout=RolloutConfig(sampling=sampling), algorithm=AlgorithmConfig(rescore=True))
    with pytest.raises(UserError, match="min_p"):
        check(config)


SERVERS = ("http://a:1", "http://b:1")


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"monitor": MonitorConfig(actions=True)}, "monitor.actions"),
        ({"rollout": RolloutConfig(workers=2, sglang=SglangConfig(urls=SERVERS, transfer="disk", folder="x"))}, "one"),
        ({"rollout": RolloutConfig(sglang=SglangConfig(colocated=True))}, "staleness=0"),
        ({"rollout": RolloutConfig(staleness=0, sglang=SglangConfig(urls=SERVERS, colocated=True))}, "worker's own"),
    ],
)
def test_loops_that_cannot_drive_it(installed: None, changes: dict, word: str) -> None:
    with pytest.raises(UserError, match=word):
        check(JobConfig(**changes))


def test_sglang_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builder, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        check(job())
    own = SglangConfig(urls=SERVERS, transfer="disk", folder="x")
    check(JobConfig(rollout=RolloutConfig(engine="sglang", sglang=own)))  # weights by file, requests by HTTP
