"""vLLM on a lent GPU: what is packed of an extension, which arms run, what steps are summed up to."""

import json
import os
import re
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bebop.bench.gpu import vllm_arm, vllm_bundle, vllm_run
from bebop.bench.gpu.stage import Context
from bebop.bench.gpu.vllm_arm import (
    SHAPES,
    Arm,
    Step,
    acceptance_check,
    capture_sizes,
    cycle,
    engine_arguments,
    make_model,
    plain,
    plan,
    without_statistics,
)
from bebop.bench.gpu.vllm_bundle import ELF, HEADER, MAGIC, SHT_NOBITS, fat_binaries, sections, slim
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_policy
from bebop.rollout.vllm.steps import StepRecord, Verified

PTX = 1


def entry(kind: int, arch: int, size: int) -> bytes:
    """Of a fat binary, with a header of 64 bytes; its code is the architecture's number again and again."""
    code = bytes([arch]) * size
    return vllm_bundle.ENTRY.pack(kind, 0x101, 64, len(code), 0, 0, 0, 0, arch).ljust(64, b"\7") + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return HEADER.pack(MAGIC, 1, HEADER.size, len(body)) + body


def elf(contents: dict[str, bytes]) -> bytes:
    """A 64-bit ELF file of these sections and of one without contents, whose offset is that of the one after it."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*contents, ".bss", ".shstrtab"))
    rows, body = [], b""
    for name, content in {**contents, ".bss": b"", ".shstrtab": names}.items():
        kind, size = (SHT_NOBITS, 1 << 20) if name == ".bss" else (1, len(content))
        at = names.index(b"\0" + name.encode() + b"\0") + 1
        rows.append(struct.pack("<IIQQQQIIQQ", at, kind, 0, 0, 64 + len(body), size, 0, 0, 1, 0))
        body += content
    header = b"\x7fELF\2\1\1".ljust(0x28, b"\0") + struct.pack("<Q", 64 + len(body))
    return header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, len(rows), len(rows) - 1) + body + b"".join(rows)


OWN = entry(ELF, 90, 40)
EXTENSION = {
    ".text": b"\x90" * 24,
    ".nv_fatbin": b"".join(
        [
            fat(entry(ELF, 80, 32), OWN, entry(PTX, 90, 16), entry(ELF, 90, 8)),
            bytes(16),  # padding
            fat(entry(ELF, 100, 16), entry(ELF, 80, 24)),  # nothing for 90, and the smallest code of all
            fat(entry(PTX, 90, 8)),  # too small for any of them
        ]
    ),
    ".data": b"data" * 4,
    ".symtab": b"symbols!" * 3,
    ".strtab": b"\0names\0\0",
}


def test_an_extension_keeps_the_code_of_one_gpu_where_it_was() -> None:
    before = elf(EXTENSION)
    after = slim(before, 90)
    assert len(after) == len(before) and sections(after) == sections(before)
    at, size = sections(before)[".nv_fatbin"]
    found = [[(kind, arch, code) for kind, arch, code in one.entries] for one in fat_binaries(after, at, size)]
    small, ptx = entry(ELF, 100, 16), entry(PTX, 90, 8)
    assert found == [[(ELF, 90, OWN), (ELF, 90, entry(ELF, 90, 8))], [(ELF, 100, small)], [(PTX, 90, ptx)]]
    starts = [[one.header for one in fat_binaries(binary, at, size)] for binary in (before, after)]
    assert starts[0] == starts[1], "addresses in the file would have to change"
    gone = {".nv_fatbin", ".symtab", ".strtab"}
    for name, (at, size) in sections(before).items():
        same = after[at : at + size] == before[at : at + size]
        assert same if name not in gone else not same
        assert name not in (".symtab", ".strtab") or not any(after[at : at + size])


def test_an_extension_without_code_for_the_gpu_is_refused() -> None:
    with pytest.raises(UserError, match=r"--arch 70 is not possible: vllm==0.32.0 has machine code for 80, 90, 100$"):
        slim(elf(EXTENSION), 70)


def test_a_library_that_was_left_out_has_every_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_out").mkdir()
    (tmp_path / "left_out" / "__init__.py").write_text(vllm_bundle.STAND_IN.format(name="left_out"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    scope: dict[str, Any] = {}
    try:
        exec("import left_out.deep.er as a\nfrom left_out.deep import Thing\nclass Own(Thing): pass", scope)
        assert scope["Thing"].ANY == "ANY" and isinstance(scope["a"].Other, type) and scope["Own"]()
        assert not hasattr(scope["a"], "__file__") and not hasattr(scope["Thing"], "_private")
    finally:
        for name in [name for name in sys.modules if name.startswith("left_out")]:
            del sys.modules[name]


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_arms_come_after_what_they_are_compared_with(device: str) -> None:
    arms = plan(device)
    assert len({arm.name for arm in arms}) == len(arms) and arms[0].check
    assert {arm.model for arm in arms} <= SHAPES.keys()
    for number, arm in enumerate(arms):
        base = Arm(model=arm.model, runner=arm.runner, attention=arm.attention)
        assert arm.check or arm.drafts == 0 or base in arms[:number], arm.name


def test_an_arm_asks_vllm_for_what_its_name_says() -> None:
    arm = Arm(model="tiny", runner="v1", system="bebop", drafts=3, attention="TRITON_ATTN")
    assert arm.name == "tiny-v1-bebop3-triton"
    asked = engine_arguments(arm, "cuda", (1, 32, 256))
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "draft_sample_method": "probabilistic"}
    assert asked["speculative_config"] == drafts and not asked["async_scheduling"] and asked["max_num_seqs"] == 256
    assert asked["max_model_len"] == 32 + 64 * 4 + 4 and asked["attention_backend"] == "TRITON_ATTN"
    greedy = engine_arguments(Arm(model="tiny", system="target_only", drafts=1), "cpu", (4,))
    assert greedy["speculative_config"] == {**drafts, "num_speculative_tokens": 1, "draft_sample_method": "greedy"}
    plainly = engine_arguments(Arm(model="tiny"), "cuda", (4,))
    assert plainly["speculative_config"] is None and plainly["async_scheduling"]
    assert replace(arm, statistics=True).name == "tiny-v1-bebop3-triton-stats"
    assert capture_sizes((1, 32, 256), 3) == [1, 4, 32, 128, 256, 1024] and capture_sizes((1, 32), 0) == [1, 32]


def test_a_model_is_one_that_vllm_has_an_mtp_layer_for(tmp_path: Path) -> None:
    context = Context(file=tmp_path / "vllm.json", seconds=60.0, dry=True, origin={})
    make_model(SHAPES["tiny"], tmp_path / "tiny", context)
    config = json.loads((tmp_path / "tiny" / "config.json").read_text())
    assert config["architectures"] == ["MiMoForCausalLM"] and config["num_nextn_predict_layers"] == 1
    assert config["dtype"] == "bfloat16" and not config["tie_word_embeddings"]
    policy = load_policy(ModelConfig(path=str(tmp_path / "tiny"), dtype="bfloat16", device="cpu"), need_head=True)
    assert policy.vocab_size == SHAPES["tiny"].vocabulary and context.rows[0]["what"] == "model"


def steps(batch: int, *spans: float) -> list[Step]:
    """A chunk of prompts, the rest of them, cycles that take so many milliseconds, and one in which a row ends."""
    made, clock = [Step(1.0, 1, 1, 1, 0)], 1.0
    for number, span in enumerate((1000.0, *spans)):
        clock += span / 1e3
        made.append(Step(clock, batch * (1 if number == 0 else 2), batch, batch, 0))
    return [*made, Step(clock + 9, 1, 1, batch, 1)]


def test_a_cycle_is_a_step_in_which_all_rows_decode() -> None:
    slow, even = (100.0,) * 4, (10.0, 12.0) * 20  # the first are warm-ups, the last beyond those that count
    found = cycle(steps(4, *slow, *even), 4)
    assert found["cycles"] == 30 and found["value"] == pytest.approx(11.0) and found["slowest ms"] == pytest.approx(12)
    assert found["tokens a row"] == 2.0 and found["tokens/s"] == pytest.approx(8 / 0.011)
    assert found["first tokens s"] == 2.0 and not found["steady"], "every second cycle takes a fifth longer"
    assert found["whole tokens/s"] == pytest.approx((1 + 4 + 44 * 8 + 1) / (2 + 0.4 + 0.44 + 9))
    assert cycle(steps(4, *slow, *[10.0, 10.4] * 20), 4)["steady"]
    assert cycle(steps(4, *slow, 10.0, 10.0), 4)["cycles"] == 2
    with pytest.raises(ValueError, match="all 4 rows decode in 6 of 8 steps: nothing can be timed"):
        cycle(steps(4, *slow, 10.0), 4)


def test_drafts_are_compared_with_their_own_plain_decoding() -> None:
    about = {"what": "cycle", "model": "m", "batch": 1, "runner": "v2", "attention": "F", "K": 0, "value": 2.0}
    others = [{**about, name: "x", "value": 9.0} for name in ("model", "batch", "runner", "attention")]
    rows = [{"what": "arm", "value": None}, *others, {**about, "K": 3, "value": 9.0}, about]
    assert plain(rows, {**about, "K": 3}) == 2.0 and plain(others, about) is None


def test_what_the_plugin_costs_and_sees_is_in_the_row() -> None:
    about = {"model": "m", "batch": 1, "runner": "v2", "attention": "F", "system": "bebop", "K": 3}
    row = {"what": "cycle", **about, "statistics": False, "value": 2.0}
    others = [{**row, name: "x"} for name in about] + [{**row, "statistics": True, "value": 9.0}]
    assert without_statistics([*others, row], {**about, "statistics": True}) == 2.0
    assert without_statistics(others, about) is None
    measured = {"overlap": [0.5, 0.1]}
    ones = [Verified(drafted=2, accepted=n, sampled=True, weight=4, measured=measured) for n in (0, 1, 2, 2)]
    ones.append(Verified(drafted=2, accepted=0, sampled=True))  # of a step that was not measured
    record = StepRecord(_found={str(number): one for number, one in enumerate(ones)})
    found = acceptance_check([StepRecord(), record])
    assert found == {"first accepted": 0.75, "first overlap": 0.5} and acceptance_check([]) == {}


def run(arm: Arm, model: Path, context: Context) -> None:
    """In place of an engine."""
    assert model.is_dir()
    os.write(1, f"in {arm.name}\n".encode())  # as a library in C would
    context.keep("cycle", 1.0, model=arm.name)
    if arm.check:
        raise ValueError("log-probs")
    time.sleep(30 if arm.runner == "v1" else 0)


def test_an_arm_that_fails_or_hangs_costs_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flash, other = Arm(model="tiny"), Arm(model="tiny", attention="TRITON_ATTN")
    hangs, drafts = replace(other, runner="v1"), replace(flash, system="bebop", drafts=1)
    arms = [replace(flash, check=True), flash, other, hangs, drafts]
    monkeypatch.setattr(vllm_arm, "plan", lambda device: arms)
    monkeypatch.setattr(vllm_arm, "run", run)
    monkeypatch.setattr(vllm_arm, "make_model", lambda shape, folder, context: folder.mkdir())
    monkeypatch.setattr(vllm_run, "import_all", lambda device: "0.0")
    monkeypatch.setattr(vllm_run, "GRACE", 9.9)
    monkeypatch.setattr(vllm_run, "LEAST", 9)
    monkeypatch.setattr(vllm_run, "ARM_SECONDS", -5.4)  # 1.9 seconds with the grace: a busy machine forks slowly
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / "vllm.json").write_text("{")  # an earlier run's
    assert vllm_run.main(["--device", "cuda", "--out", str(tmp_path)]) == 1
    content = json.loads((tmp_path / "vllm.json").read_text())
    outcomes = {row["arm"]: row["outcome"] for row in content["rows"] if row["what"] == "arm"}
    names = ["tiny-v2-check", *(f"tiny-{n}-triton" for n in ("v2-autoregressive", "v1-autoregressive", "v2-bebop1"))]
    assert list(outcomes) == names, "without FlashAttention, which may be what failed, and each once"
    check, first, hung, last = outcomes.values()
    assert re.match(r"failed after \d s: ValueError: log-probs", check)
    assert re.match(r"failed: ended after \d s, -5 were planned", hung)
    assert all(re.fullmatch(r"\d s", outcome) for outcome in (first, last))
    assert [row["model"] for row in content["rows"] if row["what"] == "cycle"] == names
    assert content["place"]["vllm"] == "0.0" and content["seconds"] == vllm_run.SECONDS
    assert "tiny-v2-bebop1-triton" in capsys.readouterr().out
    assert (tmp_path / "vllm.log").read_text() == "".join(f"in {name}\n" for name in names)
    assert not [*tmp_path.glob("*.error")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--arms", "odd"], "--arms odd is not possible on cuda: choose from SmolLM2-135M-v2-check, "),
        (["--device", "cpu", "--arms", "Qwen3-1.7B-v2-bebop3"], "not possible on cpu: choose from tiny-v1-check, "),
        (["--seconds", "0"], "0 is not possible: give a number from 1"),
        ([], "vLLM cannot be imported .*vllm.*: see benchmarks/gpu/NEXT.md"),
    ],
)
def test_what_cannot_run_is_one_line_and_nothing_is_written(
    arguments: Sequence[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(UserError, match=said):
        vllm_run.main([*arguments, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
