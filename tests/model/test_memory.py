"""What a job takes of a machine's memory, by hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from bebop.config.compose import job_config
from bebop.errors import UserError
from bebop.model import memory
from bebop.model.checkpoint import resolve
from bebop.model.memory import (
    activation_bytes,
    checkpoints_layers,
    engine_fraction,
    job_memory,
    memory_of,
    micro_batch,
    parameters,
    sums_once,
)
from bebop.rollout import capacity, torch_builder
from bebop.rollout.capacity import bytes_per_token, check_memory

CPU = torch.device("cpu")


def model(**more: object) -> SimpleNamespace:
    """A configuration of ten layers, of width 100 and an MLP of 300."""
    made = SimpleNamespace(
        num_hidden_layers=10, hidden_size=100, intermediate_size=300, num_attention_heads=4, num_key_value_heads=2,
        head_dim=25, vocab_size=1000, **more,
    )  # fmt: skip
    made.get_text_config = lambda: made
    return made


def test_micro_batches_follow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert activation_bytes(model(), torch.float32) == 10 * (12 * 100 + 4 * 300) * 4
    assert activation_bytes(model(), torch.bfloat16) == 10 * (12 * 100 + 4 * 300) * 3
    experts = model(moe_intermediate_size=50, num_experts_per_tok=2)
    assert activation_bytes(experts, torch.float32) == 10 * (12 * 100 + 4 * 100) * 4
    assert activation_bytes(model(), torch.bfloat16, True) == 10 * 4 * 100 + (12 * 100 + 4 * 300) * 3
    monkeypatch.setattr(memory, "memory_of", lambda device: 8 * 96_000 * 1000)
    assert micro_batch(model(), torch.float32, CPU, 1, 8192) == 1000
    assert micro_batch(model(), torch.float32, CPU, 2, 8192) == 500  # two ranks share it
    assert micro_batch(model(), torch.float32, CPU, 1, 64) == 64
    assert micro_batch(model(), torch.float32, CPU, 1, 8192, checkpointing=True) == 96_000 * 1000 // (4000 + 9600)
    cuda = torch.device("cuda")
    assert checkpoints_layers(model(), torch.float32, cuda, 8, 1001)
    assert not checkpoints_layers(model(), torch.float32, cuda, 8, 1000)
    assert not checkpoints_layers(model(), torch.float32, CPU, 8, 8192), "it would only be slower"
    assert sums_once(24 * 10**6, cuda, 8) and not sums_once(24 * 10**6 + 1, cuda, 8)
    assert sums_once(12 * 10**6, CPU, 2) and not sums_once(12 * 10**6 + 1, CPU, 2)
    monkeypatch.setattr(memory, "memory_of", lambda device: 1)
    assert micro_batch(model(), torch.float32, CPU, 1, 8192) == 1


def test_memory_is_what_the_control_group_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(memory, "GROUP_LIMIT", limit)
    whole = memory_of(CPU)
    for text, there in (("max\n", whole), ("1000000\n", 1_000_000), (f"{10 * whole}\n", whole)):
        limit.write_text(text)
        assert memory_of(CPU) == there


def test_a_job_says_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two billion parameters: 32 GB for Adam, 8 GB a copy in fp32, the reference among them, 1 GB a process."""
    monkeypatch.setattr(memory, "BACKWARD", 10.0)
    monkeypatch.setattr(memory, "memory_of", lambda device: 200 * 10**9)
    given = ["trainer.max_tokens=1000", "rollout.slots=10", "rollout.max_length=1000", "rollout.workers=2"]
    line = job_memory(job_config(given), model(), 2 * 10**9, CPU, True)
    assert line == (
        "about 85.0 of 200.0 GB (cpu): trainer 50.0 (weights and Adam 49.0, activations 1.0), "
        "rollout 2 x 17.0 (KV cache 0.0), Ray 1.0"
    )
    adapted = job_config([*given, "trainer.lora.rank=8", "algorithm.kl_coefficient=0.1", "rollout.staleness=2"])
    small = job_memory(adapted, model(), 2 * 10**9, CPU, True, adapter=10**8)
    # Weights twice, of which one copy is sent; 16 bytes for Adam and 4 for each older version of 0.1 billion; 1 GB.
    assert "trainer 20.4 (weights and Adam 19.4," in small
    kept = job_memory(job_config([*given, "algorithm.kl_coefficient=0.1"]), model(), 2 * 10**9, CPU, True)
    assert "trainer 58.0 (" in kept and "not enough" not in kept
    monkeypatch.setattr(memory, "memory_of", lambda device: 84 * 10**9)
    short = job_memory(job_config(given), model(), 2 * 10**9, CPU, True)
    assert "that is not enough: lower" in short and short.endswith("or give trainer.checkpointing=true")
    again = job_memory(job_config([*given, "trainer.checkpointing=true"]), model(), 2 * 10**9, CPU, True)
    assert "activations 0.1)" in again and "checkpointing" not in again
    assert "rollout" not in job_memory(job_config(given), model(), 2 * 10**9, CPU, False).partition(";")[0]


def test_a_draft_model_takes_its_weights_once_and_entries_beside_the_targets() -> None:
    """Of a job whose target has 4,000 bytes a token; the draft model is half as deep."""
    given = ["decoding=draft_model", "model.draft=tiny", "rollout.slots=1000", "rollout.max_length=10000"]
    small = model()
    small.num_hidden_layers //= 2
    line = job_memory(job_config(given), model(), 2 * 10**9, CPU, True, draft=(small, 10**9))
    assert "rollout 81." in line and "(draft model 4.0, both KV caches 60.0)" in line
    check_memory(model(), 10, 1000, torch.float32, CPU)
    with pytest.raises(UserError, match="take 4000000"):
        check_memory(model(), 10**9, 1000, torch.float32, CPU)
    with pytest.raises(UserError, match="take 6000000"):
        check_memory(model(), 10**9, 1000, torch.float32, CPU, draft=small)


def test_an_engine_takes_what_the_trainer_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trainer of 50 GB on a GPU of 100 GB, of which 5 stay free; in turns it keeps 41 GB."""
    monkeypatch.setattr(memory, "BACKWARD", 10.0)
    monkeypatch.setattr(memory, "memory_of", lambda device: 100 * 10**9)
    given = ["trainer.max_tokens=1000", "rollout.max_length=1000", "trainer.checkpointing=false"]

    def fraction(*more: str) -> float:
        return engine_fraction(job_config([*given, *more]), model(), 2 * 10**9, torch.device("cuda"))

    assert fraction("rollout=vllm") == fraction("rollout=sglang") == 0.45
    assert fraction("rollout=vllm", "rollout.workers=2") == 0.22
    turns = fraction("rollout=sglang", "rollout.sglang.colocated=true", "rollout.staleness=0")
    assert turns == 0.54
    monkeypatch.setattr(memory, "memory_of", lambda device: 60 * 10**9)
    with pytest.raises(UserError, match=r"vllm.memory_fraction=null .* of 60.0 GB .* about 50.0, .* 8.0 or") as caught:
        fraction("rollout=vllm")
    assert "\n" not in str(caught.value)


def test_pages_take_what_they_hold() -> None:
    """4,000 bytes a token: 40 GB for all slots at full length, 8 GB for two million tokens."""
    given = ["rollout.slots=1000", "rollout.max_length=10000"]
    for more, size in (([], "40.0"), (["rollout.torch.cache_tokens=2000000"], "8.0")):
        assert f"(KV cache {size})" in job_memory(job_config([*given, *more]), model(), 10**9, CPU, True)


def test_parameters_are_counted_by_headers() -> None:
    count = parameters(sorted(resolve("tiny").glob("*.safetensors")))
    assert 1_500_000 < count < 2_500_000


def test_workers_with_a_gpu_each_share_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = job_config(["rollout.workers=7", "rollout.slots=64", "rollout.parked_bytes=0"])
    settings = AutoConfig.from_pretrained(resolve(config.model.path), local_files_only=True)
    one = 64 * config.rollout.max_length * bytes_per_token(settings, getattr(torch, config.model.dtype))
    monkeypatch.setattr(torch_builder, "find_device", lambda model: torch.device("cuda"))
    monkeypatch.setattr(capacity, "memory_of", lambda device: int(1.5 * one))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    torch_builder.check(config)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="is not possible"):
        torch_builder.check(config)
