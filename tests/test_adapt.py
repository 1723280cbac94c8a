"""Adaptation from the command line: a checkpoint in, a better head in the same layout out; mistakes are one line."""

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from bebop import adapt, command
from bebop.adaptation import corpus
from bebop.config.job import ModelConfig
from bebop.model.checkpoint import load_policy, mtp_layout, save_policy
from bebop.model.layouts import LAYOUTS
from bebop.run_dir import state_codec as codec
from bebop.trainer.heads import HeadTrainer
from tests.adaptation.builders import random_policy
from tests.builders import letters
from tests.cases import slow_but
from tests.tiny_families import FAMILIES, write_family

ROOT = Path(__file__).parents[1]
SMALL = [
    "model.device=cpu", "task=gcd", "data.sequences=12", "data.slots=12", "data.sampling.max_new_tokens=10",
    "evaluation.prompts=4", "evaluation.draft_tokens=2", "train.rows_per_step=4", "train.warm_steps=1",
    "train.save_every=2", "train.eval_every=2", "train.threads=1", "head.depth=2", "head.lr=0.002",
    "head.lr_warmup_steps=0", "tensorboard=false", "progress=false",
]  # fmt: skip


def adapted(model: Path, folder: Path, steps: int, *more: str) -> dict[str, Tensor]:
    """Run the command; the tensors of the checkpoint that it wrote."""
    assert adapt.main([f"model.path={model}", f"dir={folder}", f"train.steps={steps}", *SMALL, *more]) == 0
    return load_file(folder / "model" / "model.safetensors")


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    save_policy(random_policy(), folder)
    return folder


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an adaptation of four steps; what it wrote to the terminal lies beside it."""
    folder: Path = tmp_path_factory.mktemp("runs") / "whole"
    with (folder.parent / "out").open("w") as out, (folder.parent / "err").open("w") as err:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            adapted(model, folder, 4)
    return folder


def test_the_head_is_trained_and_the_backbone_is_the_same_to_the_last_bit(model: Path, run: Path) -> None:
    before, after = load_file(model / "model.safetensors"), load_file(run / "model" / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert before.keys() == after.keys()
    assert changed == {name for name in before if name.startswith("model.mtp_layers.0.")}


def test_the_end_says_what_the_page_says_and_where_the_model_is(model: Path, run: Path) -> None:
    start = (run.parent / "err").read_text().splitlines()
    end = (run.parent / "out").read_text().splitlines()[5:]  # a table comes first
    said = dict(line.split(": ", 1) for line in end)
    assert said["model"] == f"{run}/model" and said["report"] == f"{run}/report.html" and len(end) <= 8
    opening = (run / "report.html").read_text().split("<main>")[0]
    assert said["verdict"].split(" (")[0] in opening and said["advice"] in opening
    assert len(start) == len(set(start)) == 3 and start[1].startswith(f"  model      {model}, ")
    assert start[2].startswith("  training   4 steps of e2e_tv on 12 completions, learning rate ")


def test_everything_is_written(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all({"head/loss", "head/grad_norm", "head/lr"} <= line.keys() for line in lines)
    assert ["eval/accept_length" in line for line in lines] == [False, True, False, True]
    results = json.loads((run / "results.json").read_text())
    found = results["systems"]["bebop"]
    gap = found["after"]["accept_length"]["value"] - found["before"]["accept_length"]["value"]
    assert found["change"]["accept_length"]["value"] == pytest.approx(gap)
    assert results["rows"] == 12 and results["steps"] == 4 and results["fresh"] is False
    card = (run / "model" / "README.md").read_text()
    assert f"{found['after']['accept_length']['value']:.3f} [" in card and str(run.parent) not in card
    assert "const FIGURES" in (run / "report.html").read_text()
    assert len((run / "corpus.jsonl").read_text().splitlines()) == 12


@pytest.mark.slow  # two runs; the corrupt checkpoint's test below also resumes and compares to the bit
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    model: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    half = adapted(model, tmp_path, 2)
    whole = load_file(run / "model" / "model.safetensors")
    assert not same(half, whole)
    assert adapt.main([f"dir={tmp_path}", "resume=true", "train.steps=4"]) == 0
    assert "accept length" in capsys.readouterr().out
    assert same(load_file(tmp_path / "model" / "model.safetensors"), whole)
    assert (tmp_path / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()


@pytest.mark.slow  # a run and its resume
def test_a_run_that_was_stopped_while_it_sampled_goes_on(
    model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    decoded = corpus.decoded

    def stopped(engine: Any, requests: Any, bar: Any) -> Any:
        for count, finished in enumerate(decoded(engine, requests, bar)):
            yield finished
            if count == 6:
                raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(corpus, "decoded", stopped)
        adapted(model, tmp_path, 4)
    assert [file.name for file in tmp_path.glob("*.jsonl")] == ["corpus.part0.jsonl"]
    assert call([f"dir={tmp_path}"], monkeypatch, capsys).endswith(
        "set resume=true to go on with it, or choose another"
    )
    assert adapt.main([f"dir={tmp_path}", "resume=true"]) == 0
    assert (tmp_path / "corpus.jsonl").read_text() == (run / "corpus.jsonl").read_text()
    assert same(load_file(tmp_path / "model" / "model.safetensors"), load_file(run / "model" / "model.safetensors"))


@pytest.mark.slow  # two runs
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_keeps_the_steps_that_are_done(
    number: int, model: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes in the middle of the third step, before any checkpoint was due."""
    learn = HeadTrainer.update

    def stopped(trainer: HeadTrainer, *arguments: Any) -> Any:
        if trainer.version == 2:
            os.kill(os.getpid(), number)
        return learn(trainer, *arguments)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(HeadTrainer, "update", stopped)
        adapted(model, tmp_path, 4, "train.save_every=0")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["head_000003"]
    assert adapt.main([f"dir={tmp_path}", "resume=true"]) == 0
    assert same(load_file(tmp_path / "model" / "model.safetensors"), load_file(run / "model" / "model.safetensors"))
    assert (tmp_path / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("layout", slow_but(["deepseek"], [name for name in LAYOUTS if name != "mimo"]))
def test_the_layout_is_the_one_it_came_in(layout: str, tmp_path: Path) -> None:
    save_policy(random_policy(layout), tmp_path / "in")
    before, after = load_file(tmp_path / "in" / "model.safetensors"), adapted(tmp_path / "in", tmp_path / "run", 1)
    assert before.keys() == after.keys() and not same(before, after)
    assert mtp_layout(tmp_path / "run" / "model", 2) == layout
    assert load_policy(ModelConfig(path=str(tmp_path / "run" / "model"), device="cpu"), need_head=True).layout == layout


@pytest.mark.slow
def test_a_checkpoint_without_a_head_gets_one_and_text_may_come_from_a_file(tmp_path: Path) -> None:
    save_policy(dataclasses.replace(random_policy(), mtp=None), tmp_path / "in")
    rows = [{"prompt": f"{i} + 2 =", "answer": f"{i + 2}, which is the answer"} for i in range(20)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = ["data.source=file", "data.sequences=0", f"data.path={tmp_path / 'text.jsonl'}", f"out={tmp_path / 'out'}"]
    given = [f"model.path={tmp_path / 'in'}", f"dir={tmp_path / 'run'}", "train.steps=1", *SMALL, *source]
    assert adapt.main(given) == 0
    assert mtp_layout(tmp_path / "out", 2) == "mimo"
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["fresh"] is True and results["rows"] == 16, "four prompts are held out"
    assert "text.jsonl" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.slow
def test_two_ranks_adapt_as_one_does(model: Path, run: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command = [*torchrun, "bebop.adapt", f"model.path={model}", f"dir={tmp_path}", "train.steps=4", *SMALL]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    ours, wanted = (load_file(folder / "model" / "model.safetensors") for folder in (tmp_path, run))
    start = load_file(model / "model.safetensors")
    moved = max(float((wanted[name] - start[name]).abs().max()) for name in start)
    assert max(float((ours[name] - wanted[name]).abs().max()) for name in wanted) < 1e-4 < 1e-3 < moved
    assert (tmp_path / "corpus.jsonl").read_text() == (run / "corpus.jsonl").read_text()


@pytest.mark.slow  # eight seconds a family
@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "llama"])
def test_heads_of_families_are_trained_whether_the_engine_can_decode_them_or_not(name: str, tmp_path: Path) -> None:
    before = load_file(write_family(tmp_path / "in", name) / "model.safetensors")
    after = adapted(tmp_path / "in", tmp_path / "run", 24, "data.sequences=24", "head.lr=0.003")
    prefix = FAMILIES[name].prefix.format(L=2)
    copies = {f"{prefix}embed_tokens.weight", f"{prefix}shared_head.head.weight"}
    frozen = {key for key in before if not key.startswith(prefix) or key in copies or "correction_bias" in key}
    assert before.keys() == after.keys()
    assert {key for key in before if torch.equal(before[key], after[key])} == frozen
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [step["head/loss"] for step in steps[1:]]  # the first one is the warm-up's
    assert sum(losses[-6:]) / 6 < sum(losses[:6]) / 6 - 0.02
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    found = results["systems"]["bebop"]
    estimated = name not in ("glm4_moe", "llama")
    assert results["estimated"] is estimated and results["fresh"] is False
    assert found["after"]["overlap/1"]["value"] > found["before"]["overlap/1"]["value"] + 0.01
    shown = "Estimated at every place" in (tmp_path / "run" / "report.html").read_text()
    same_number = steps[-1]["eval/accept_length"] == pytest.approx(found["after"]["accept_length"]["value"])
    assert shown is same_number is estimated
    again = load_policy(ModelConfig(path=str(tmp_path / "run" / "model"), device="cpu"), True, any_backbone=True)
    save_policy(again, tmp_path / "again")
    assert same(load_file(tmp_path / "again" / "model.safetensors"), after)


@pytest.mark.slow  # a run and its resume
def test_a_stopped_run_beside_such_a_backbone_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    write_family(tmp_path / "in", "qwen3_5")
    whole = adapted(tmp_path / "in", tmp_path / "whole", 4)
    adapted(tmp_path / "in", tmp_path / "half", 2)
    assert adapt.main([f"dir={tmp_path / 'half'}", "resume=true", "train.steps=4"]) == 0
    assert same(load_file(tmp_path / "half" / "model" / "model.safetensors"), whole)


@pytest.mark.slow  # two runs, one of them with two processes
def test_two_ranks_train_the_head_of_a_hybrid_as_one_does(tmp_path: Path) -> None:
    """On the same text: layers of experts and recurrent ones are split over the ranks."""
    folder = write_family(tmp_path / "in", "qwen3_next")
    rows = [{"prompt_ids": [3 + i, 5], "answer_ids": [7, 4 + i, 9, 6, 5, 4 + i, 8][: 4 + i % 4]} for i in range(20)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ["data.source=file", "data.sequences=0", f"data.path={tmp_path / 'text.jsonl'}"]
    one = adapted(folder, tmp_path / "one", 3, *given)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    arguments = [f"model.path={folder}", f"dir={tmp_path / 'two'}", "train.steps=3", *SMALL, *given]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    ended = subprocess.run(
        [*torchrun, "bebop.adapt", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    two, start = load_file(tmp_path / "two" / "model" / "model.safetensors"), load_file(folder / "model.safetensors")
    moved = max(float((one[name] - start[name]).abs().max()) for name in start)
    assert max(float((two[name] - one[name]).abs().max()) for name in one) < 1e-4 < 1e-3 < moved


# ---- mistakes


def call(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr with which the command ends; exit code 2."""
    monkeypatch.setattr(sys, "argv", ["bebop.adapt", *arguments])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        command.run_main(adapt.main)
    lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith(("run folder:", "  "))]
    assert ended.value.code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0]


BAD = [
    (["head.objective=warp"], "objective='warp' is not possible: choose one of tv, ce, hard_ce"),
    (["train.warm_objective=warp"], "objective='warp' is not possible"),
    (["head.depth=0"], "head.depth=0 is not possible: give a number from 1 to 16"),
    (["head.warp=1"], "head.warp: no such setting; head has objective, depth"),
    (["out=MODEL"], "it is model.path: give another folder, the original is kept"),
    (["resume=true"], "resume=True is not possible: give the run's folder as dir"),
    (["resume=true", "dir=NEW"], "holds no finished checkpoint"),
    (["dir=RUN"], "holds an adaptation: set resume=true to go on with it, or choose another"),
    (["data.source=file"], "data.path=None is not possible: source=file needs a"),
    (["data.source=file", "data.path=EMPTY"], "has no rows: give a file with at least one"),
    (["data.source=file", "data.path=FEW", "dir=NEW"], "has 1 different prompts in 5 usable rows: give 10 or more"),
    (["data.sampling.temperature=0"], "adaptation learns from samples: > 0"),
    (["data.sampling.top_p=2"], "data.sampling.top_p=2.0 is not possible"),
    (["train.steps=0"], "train.steps=0 is not possible: give 1 or more"),
    (["--warp"], "--warp is no option"),
]


# Each composes a configuration for a third of a second: one of each place that finds a mistake is quick.
@pytest.mark.parametrize(
    ("arguments", "message"), slow_but([BAD[0], BAD[4], BAD[6], BAD[9], BAD[14]], BAD, several=True)
)
def test_mistakes_are_one_line(
    arguments: list[str], message: str, model: Path, run: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "few.jsonl").write_text('{"prompt_ids": [1], "answer_ids": [2]}\n' * 5)
    places = {"MODEL": model, "RUN": run, "NEW": tmp_path / "new", "EMPTY": tmp_path / "empty.jsonl"}
    places["FEW"] = tmp_path / "few.jsonl"
    monkeypatch.chdir(tmp_path)
    given = [f"{name}={places.get(value, value)}" for name, _, value in (a.partition("=") for a in arguments)]
    given = given if arguments != ["--warp"] else arguments
    assert message in call([f"model.path={model}", *SMALL, *given], monkeypatch, capsys)


def damaged(model: Path, folder: Path, how: str) -> None:
    """A copy of a checkpoint with something wrong about it."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    state = load_file(file)
    if how == "partly missing":
        del state["model.mtp_layers.0.input_proj.weight"]
    elif how == "wrong shape":
        state["model.mtp_layers.0.input_proj.weight"] = torch.zeros(4, 4)
    elif how == "unknown layout":
        state = {name.replace("model.mtp_layers.0.", "model.mtp_block."): t for name, t in state.items()}
    else:
        letters(len(state["lm_head.weight"]) + 5).save_pretrained(folder)
    save_file(state, file, metadata={"format": "pt"})


DAMAGES = [
    ("partly missing", "input_proj.weight"),
    ("wrong shape", "MTP weight project.weight has shape (4, 4), the model needs (32, 64)"),
    ("unknown layout", "is in no known layout (mimo, qwen3_next, deepseek)"),
    ("other vocabulary", "they do not belong together"),
]


@pytest.mark.slow  # a family's import
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["part=block"], "linear_attention is not possible: full_attention is; bebop.adapt trains its MTP head, and"),
        (["task=environment"], "linear_attention is not possible"),
        (["data.sampling.stop=[x]"], "data.sampling.stop=['x'] is not possible for a qwen3_next model"),
    ],
)
def test_what_needs_the_engine_is_refused_for_a_backbone_that_it_cannot_decode(
    given: list[str], message: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    folder = write_family(tmp_path / "in", "qwen3_next")
    arguments = [f"model.path={folder}", f"dir={tmp_path / 'run'}", *SMALL, *given]
    assert message in call(arguments, monkeypatch, capsys)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("how", "message"), slow_but(DAMAGES[:1], DAMAGES, several=True))
def test_checkpoints_that_do_not_fit_are_one_line(
    how: str, message: str, model: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    damaged(model, tmp_path / "in", how)
    assert message in call([f"model.path={tmp_path / 'in'}", f"dir={tmp_path / 'run'}", *SMALL], monkeypatch, capsys)


def damage(file: Path) -> None:
    """One bit in the middle."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
def test_a_corrupt_checkpoint_is_named_and_an_older_one_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    kept = folder / "checkpoints"
    damage(kept / "head_000004" / "head.safetensors")
    assert adapt.main([f"dir={folder}", "resume=true"]) == 0
    assert "head_000004/head.safetensors is corrupt" in caplog.text and "going on from head_000002" in caplog.text
    assert same(load_file(folder / "model" / "model.safetensors"), load_file(run / "model" / "model.safetensors"))
    assert (folder / "metrics.jsonl").read_text() == (run / "metrics.jsonl").read_text()
    names = sorted(path.name for path in kept.iterdir())
    assert [name.split("-")[0] for name in names] == ["aside", "head_000002", "head_000004"], names
    damage(kept / "head_000002" / "head.safetensors"), damage(kept / "head_000004" / "head.safetensors")
    before = (folder / "overrides.json").read_text()
    message = call([f"dir={folder}", "resume=true", "head.lr=0.5"], monkeypatch, capsys)
    assert "holds no checkpoint that is whole" in message and "head_000002/head.safetensors" in message
    assert (folder / "overrides.json").read_text() == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_one_line_and_the_last_good_checkpoint_stays(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = ["train.steps=9", "train.save_every=1", "head.lr=1e30"]
    message = call([f"model.path={model}", f"dir={tmp_path}", *SMALL, *steps], monkeypatch, capsys)
    assert "head.lr=1e+30: the loss of the MTP head is not finite in 3 steps running" in message
    kept = sorted((tmp_path / "checkpoints").glob("head_*"))
    assert kept and all(t.isfinite().all() for t in codec.load(kept[-1] / "head")["weights"].values())
    assert not (tmp_path / "model").exists()


def test_help_and_the_configuration_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt.main(["--help"]) == 0 and "e2e_tv_corrected" in capsys.readouterr().out
    assert adapt.main(["--cfg", "head.objective=nla"]) == 0 and "objective: nla" in capsys.readouterr().out
