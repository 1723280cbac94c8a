"""What SGLang is started with, and what is refused before it starts."""

import dataclasses
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from bebop.config.engines import SglangConfig
from bebop.config.job import AlgorithmConfig, DecodingConfig, JobConfig, MonitorConfig, RolloutConfig, TrainerConfig
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from bebop.rollout.sglang import builder
from bebop.rollout.sglang.arguments import (
    pause_mode,
    refuse_length,
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


@pytest.mark.parametrize(("system", "rejection"), [("eagle3", True), ("eagle3_target_only", False)])
def test_an_eagle3_drafter_is_named(system: str, rejection: bool, tmp_path: Path) -> None:
    arguments = server_arguments(job(system, draft_tokens=4), SglangConfig(), TINY, "cuda", tmp_path)
    assert arguments["speculative_algorithm"] == "EAGLE3"
    assert arguments["speculative_draft_model_path"] == str(tmp_path) != arguments["model_path"]
    assert arguments["speculative_use_rejection_sampling"] is rejection
    assert arguments["speculative_num_draft_tokens"] == 5


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
        "enable_memory_saver": True, "enable_weights_cpu_backup": True, "attention_backend": "fa3",
        "speculative_use_block_verification": True, "max_running_requests": 7, "context_length": 304,
        "chunked_prefill_size": 64, "log_level": "info", "weight_version": "0",
    }  # fmt: skip
    assert {name: arguments[name] for name in wanted} == wanted
    assert "device" not in arguments


def test_completions_leave_sglang_the_positions_that_it_looks_ahead() -> None:
    settings = Qwen2Config(max_position_embeddings=300)
    for length in (296, 300):
        config = dataclasses.replace(job(), rollout=RolloutConfig(max_length=length, slots=7))
        if length + 1 + config.decoding.limit <= 300:
            refuse_length(config, settings)
            continue
        with pytest.raises(UserError, match=r"rollout.max_length=300 is not possible .* give 296 or less"):
            refuse_length(config, settings)


def test_two_workers_draw_different_numbers_unless_completions_have_seeds() -> None:
    for own, same in ((SglangConfig(), False), (SglangConfig(deterministic=True), True)):
        first, second = (server_arguments(job(), own, TINY, "cuda")["random_seed"] for _ in range(2))
        assert (first == second) is same


def test_the_overlapped_scheduler_is_off_where_completions_are_kept_while_weights_change() -> None:
    """A batch in flight would be finished under the next weights, and named by their version."""
    for pause, off in (("in_place", True), ("retract", None), ("abort", None)):
        arguments = server_arguments(job(), SglangConfig(pause=pause), TINY, "cuda")
        assert arguments.get("disable_overlap_schedule") is off


def test_a_cpu_takes_what_it_can_run() -> None:
    arguments = server_arguments(job(), SglangConfig(), TINY, "cpu")
    assert (arguments["device"], arguments["attention_backend"]) == ("cpu", "triton")
    arguments = server_arguments(job(), SglangConfig(attention_backend="torch_native"), TINY, "cpu")
    assert arguments["attention_backend"] == "torch_native"


SERVER = {
    "version": "0.5.23", "speculative_algorithm": "EAGLE", "speculative_num_steps": 3, "speculative_eagle_topk": 1,
    "speculative_use_rejection_sampling": True, "speculative_accept_threshold_single": 1.0,
    "disable_overlap_schedule": True,
}  # fmt: skip


def system(own: SglangConfig | None = None, device: str = "cuda", **decoding: Any) -> Callable[[], None]:
    return lambda: refuse_system(DecodingConfig(**decoding), own or SglangConfig(), device)


def settings(**own: Any) -> Callable[[], SglangConfig]:
    return lambda: SglangConfig(**own)


def sampling(speculative: bool, rescored: bool, **params: Any) -> Callable[[], None]:
    return lambda: refuse_sampling(SamplingParams(**params), speculative, rescored)


def server(system: str = "bebop", **change: Any) -> Callable[[], None]:
    return lambda: refuse_server(SERVER | change, DecodingConfig(system=system), "in_place", "http://a")


@pytest.mark.parametrize(
    ("refused", "word"),
    [
        (system(draft_temperature=0.5), "draft_temperature"),
        (system(draft_tokens="auto"), "draft_tokens=auto"),
        (system(draft_temperature="auto"), "draft_temperature=auto"),
        (system(draft_temperature=0.0), "target_only"),
        (system(SglangConfig(block_verification=True), "cpu"), "GPU"),
        (system(SglangConfig(block_verification=True), system="target_only"), "sampled drafts"),
        (system(SglangConfig(deterministic=True), "cpu"), "deterministic"),
        (settings(extra={"speculative_eagle_topk": 4}), "speculative_eagle_topk"),
        (settings(extra={"speculative_token_map": "hot.pt"}), "speculative_token_map"),
        (settings(data_parallel=2), "data_parallel"),
        (settings(transfer="disk"), "folder"),
        (settings(transfer="pigeon"), "transfer"),
        (settings(pause="wait"), "pause"),
        (settings(urls=("localhost:30000",)), "urls"),
        (settings(memory_fraction=1.5), "memory_fraction"),
        (settings(tensor_parallel=0), "tensor_parallel"),
        (settings(monitor_every=-1), "monitor_every"),
        (settings(timeout=0.0), "timeout"),
        (sampling(True, True, repetition_penalty=1.1), "repetition_penalty"),
        (sampling(False, True, repetition_penalty=1.1), "repetition_penalty"),
        (sampling(True, True, min_p=0.1), "min_p"),
        (sampling(True, False, top_p=0.9), "rescore"),
        (sampling(False, False, top_k=5), "rescore"),
        *((partial(refuse_version, old), r"0\.5\.14") for old in ("0.5.13", "0.5.12.post2", "0.4.99", "")),
        (server(version="0.5.12"), "0.5.14 or newer"),
        (server(speculative_algorithm=None), "runs with speculative_algorithm=None"),
        (server(speculative_algorithm="NGRAM"), "runs with speculative_algorithm='NGRAM'"),
        (server(speculative_eagle_topk=4), "runs with speculative_eagle_topk=4"),
        (server(speculative_use_rejection_sampling=False), "runs with speculative_use_rejection_sampling=False"),
        (server("target_only"), "runs with speculative_use_rejection_sampling=True"),
        (server("autoregressive"), "runs with speculative_algorithm='EAGLE'"),
        (server(speculative_num_steps=2), "runs with speculative_num_steps=2"),
        (server(speculative_accept_threshold_single=0.9), "runs with speculative_accept_threshold_single=0.9"),
        (server(disable_overlap_schedule=False), "runs with disable_overlap_schedule=False, .*rollout.sglang.pause="),
    ],
)
def test_what_sglang_cannot_do_is_refused(refused: Callable[[], Any], word: str) -> None:
    with pytest.raises(UserError, match=word):
        refused()


def test_systems_that_it_has() -> None:
    for system in ("autoregressive", "target_only", "bebop", "bebop_adaptive"):
        refuse_system(DecodingConfig(system=system), SglangConfig(), "cpu")
    refuse_system(DecodingConfig(system="target_only", draft_temperature=0.0), SglangConfig(), "cpu")


def test_versions_and_distributions_that_it_takes() -> None:
    for version in ("0.5.14", "0.5.23", "0.5.14.post1", "0.6.0rc1", "1.0"):
        refuse_version(version)
    refuse_sampling(SamplingParams(temperature=0.7), True, False)
    refuse_sampling(SamplingParams(top_p=0.9, top_k=5), True, True)
    refuse_sampling(SamplingParams(min_p=0.1), False, True)


def test_a_draft_vocabulary_that_differs(tmp_path: Path) -> None:
    for settings in ({"vocab_size": 100}, {"vocab_size": 100, "draft_vocab_size": 100}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        refuse_vocabulary(tmp_path)
    fewer = {"vocab_size": 100, "draft_vocab_size": 32}
    for settings in (fewer, {"text_config": fewer}):
        (tmp_path / "config.json").write_text(json.dumps(settings))
        with pytest.raises(UserError, match="of 100 tokens"):
            refuse_vocabulary(tmp_path)


def test_servers_that_decode_as_wanted() -> None:
    refuse_server(SERVER, DecodingConfig(), "in_place", "http://a")
    refuse_server(
        SERVER | {"speculative_num_steps": 7}, DecodingConfig(system="bebop_adaptive"), "in_place", "http://a"
    )
    greedy = SERVER | {"speculative_use_rejection_sampling": False}
    refuse_server(greedy, DecodingConfig(system="target_only"), "in_place", "http://a")
    plain = {"version": "0.5.23", "speculative_algorithm": None}
    refuse_server(plain, DecodingConfig(system="autoregressive"), "in_place", "http://a")
    refuse_server(SERVER | {"disable_overlap_schedule": False}, DecodingConfig(), "retract", "http://a")


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
        ({"trainer": TrainerConfig(routing_replay=True)}, "trainer.routing_replay=True is not possible with SGLang's"),
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
