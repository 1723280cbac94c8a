"""``bebop demo``: what it shows of a cycle, the planted fault, both verdicts, and how it ends."""

import io
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from bebop import demo
from bebop.certify.run import make_run
from bebop.config.compose import certify_config
from bebop.kernels.verify import chain_verify
from bebop.rollout.decoding.base import Draft, TargetOutput
from bebop.rollout.decoding.rules import Rejection
from tests.commands import error_of
from tests.test_packaging import alone, build, environment


@pytest.mark.parametrize(
    ("accepted", "emitted", "shown"),
    [
        (0, 1, [("rejected", 1), ("recovered", 9)]),
        (2, 3, [("accepted", 1), ("accepted", 2), ("rejected", 3), ("recovered", 9)]),
        (3, 4, [("accepted", 1), ("accepted", 2), ("accepted", 3), ("bonus", 9)]),
        (3, 2, [("accepted", 1), ("accepted", 2)]),  # the second draft is a stop token
        (2, 2, [("accepted", 1), ("accepted", 2)]),  # the limit cuts the recovered token
    ],
)
def test_tokens_of_a_cycle_are_told_apart(accepted: int, emitted: int, shown: list[tuple[str, int]]) -> None:
    assert demo.cycle_tokens([1, 2, 3], accepted, 9, emitted) == shown


def test_colours_are_for_terminals_that_want_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert demo.colored(Terminal()) and not demo.colored(io.StringIO())
    monkeypatch.setenv("NO_COLOR", "1")
    assert not demo.colored(Terminal())
    assert demo.styled("rejected", " 7", False) == "[- 7-]" and demo.styled("accepted", "7", False) == "7"
    assert demo.LEGEND.keys() == demo.STYLES.keys()
    assert len({demo.styled(kind, "7", color) for kind in demo.STYLES for color in (True, False)}) == 8


def test_the_planted_fault_changes_the_bonus_token_alone_and_goes_away() -> None:
    numbers = torch.Generator().manual_seed(0)
    rows, drafts, vocabulary = 4000, 2, 5
    q, p = (torch.rand(rows, n, vocabulary, generator=numbers).softmax(-1) for n in (drafts, drafts + 1))
    draft = Draft(tokens=torch.multinomial(q.flatten(0, 1), 1, generator=numbers).view(rows, drafts), probs=q)
    out = TargetOutput(hidden=p, logits=p, probs=p)
    uniforms = torch.rand(rows, drafts + 2, generator=numbers)

    def verified() -> tuple[torch.Tensor, torch.Tensor]:
        made = Rejection().accept(None, draft, out, uniforms)  # type: ignore[arg-type]  # this rule reads no rows
        return made.lengths, made.tokens.gather(1, made.lengths[:, None])[:, 0]

    lengths, right = verified()
    with demo.planted_fault():
        same, wrong = verified()
    torch.testing.assert_close(same, lengths)
    full = lengths == drafts
    torch.testing.assert_close(wrong[~full], right[~full])
    assert (wrong[full] != right[full]).float().mean() > 0.01 and 0.1 < full.float().mean() < 0.95
    torch.testing.assert_close(verified()[1], chain_verify(draft.tokens, q, p, uniforms)[1])


def test_only_a_pass_and_a_failure_are_a_success() -> None:
    verdicts = ("pass", "fail", "inconclusive")
    codes = {(sound, faulty): demo.as_expected(sound, faulty) for sound in verdicts for faulty in verdicts}
    assert [pair for pair, code in codes.items() if code == 0] == [("pass", "fail")]


def test_a_folder_that_holds_something_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    said = error_of(lambda _: demo.main(["--dir", str(tmp_path)]), [], capsys)
    assert "it holds something already; choose another folder" in said
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.slow
def test_the_whole_demo_from_the_wheel_alone(tmp_path: Path) -> None:
    """As a user runs it: a real job, a completion, a certificate that passes and one that fails."""
    program, folder = environment(tmp_path / "clean", str(build(tmp_path))) / "bebop", tmp_path / "demo"

    def bebop(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [program, *arguments], cwd=tmp_path, env=alone(), capture_output=True, text=True, check=False
        )

    done = bebop("--version")
    assert done.returncode == 0 and "(commit" not in done.stdout, "an installed copy is no checkout"
    done = bebop("bench", "draft_temperature")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "in a checkout alone" in done.stderr
    done = bebop("demo", "--dir", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    parts = re.split(r"\n(?=\d/4  )", done.stdout)
    assert [part[:3] for part in parts[1:]] == ["1/4", "2/4", "3/4", "4/4"]
    for mark in ("[-", "{+", "{*"):
        assert parts[2].count(mark) >= 2, "in the legend and in the text"
    length = re.search(r"accept length: (\d\.\d\d) tokens a cycle", parts[2])
    assert length and 1.5 < float(length[1]) <= 4
    assert "\nPass: the embedded engine samples" in parts[3] and "\nFail: the embedded engine does not" in parts[4]
    files = ("report.html", "certificate/report.html", "certificate-of-the-fault/certificate.json", "metrics.jsonl")
    assert [name for name in files if not (folder / name).is_file()] == []
    assert f"bebop view {folder.relative_to(tmp_path)}\n" in parts[4]


@pytest.mark.slow
def test_an_interrupt_during_a_certificate_is_one(tmp_path: Path) -> None:
    timer = threading.Timer(3.0, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        demo.certify(certify_config([*demo.CERTIFICATE, "tokens=1000000"]), tmp_path / "certificate")
    timer.cancel()
    assert not (tmp_path / "certificate").exists()


@pytest.mark.exhaustive("twenty seeds of two certificates take minutes; the demo itself runs in make test-slow")
def test_the_budget_tells_a_sound_engine_from_the_faulty_one_at_every_seed() -> None:
    verdicts = []
    for seed in range(20):
        config = certify_config([*demo.CERTIFICATE, f"seed={seed}"])
        verdicts.append(_certified(config))
        with demo.planted_fault():
            verdicts.append(_certified(config))
    assert verdicts == ["pass", "fail"] * 20


def _certified(config: demo.CertifyConfig) -> str:
    import contextlib

    with contextlib.ExitStack() as stack:
        return make_run(config, stack).run().verdict
