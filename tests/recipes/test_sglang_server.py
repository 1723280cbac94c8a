"""What ``recipes/sglang/server.sh`` starts, and to whom it opens the server: a stub stands for python."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "recipes" / "sglang" / "server.sh"
BLOCKS = SCRIPT.with_name("dflash.sh")
NO_GPU = '#!/usr/bin/env bash\n[[ "$1" != -c ]] || exit 1\n' + "touch $RECORD\n"
STUB = '#!/usr/bin/env bash\n[[ "$1" != -c ]] || exit 0\nprintf "%s\\n" "$@" >"$RECORD"\n'


def launch(
    folder: Path, *arguments: str, script: Path = SCRIPT, stubbed: str = STUB, **environment: str
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run a script with a ``python`` that writes down its arguments; those, none if it was never called."""
    stub, record = folder / "python", folder / "arguments"
    stub.write_text(stubbed)
    record.unlink(missing_ok=True)
    stub.chmod(0o755)
    clean = {
        name: value for name, value in os.environ.items() if name not in ("HOST", "PORT", "SGLANG_API_KEY", "DRAFT")
    }
    own = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "RECORD": str(record), "MODEL": "/checkpoint"}
    done = subprocess.run(
        ["bash", str(script), *arguments],
        env={**clean, **own, **environment},
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done, record.read_text().splitlines() if record.exists() else []


def after(arguments: list[str], flag: str) -> str:
    """The value that follows a flag, which is given once."""
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


def test_a_server_is_for_this_machine_alone(tmp_path: Path) -> None:
    done, arguments = launch(tmp_path, "--log-level", "info")
    assert done.returncode == 0, done.stderr
    assert arguments[:2] == ["-m", "sglang.launch_server"] and arguments[-2:] == ["--log-level", "info"]
    assert after(arguments, "--host") == "127.0.0.1"
    assert "--api-key" not in arguments
    assert "--disable-overlap-schedule" in arguments, "tokens in flight would get the version of later weights"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.0.2", "localhost", "::1"])
def test_loopback_needs_no_key_and_may_have_one(tmp_path: Path, host: str) -> None:
    _, arguments = launch(tmp_path, HOST=host)
    assert after(arguments, "--host") == host and "--api-key" not in arguments
    _, arguments = launch(tmp_path, HOST=host, SGLANG_API_KEY="secret")
    assert after(arguments, "--api-key") == "secret"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "127.0.0.1.example.org", "node7", "1127.0.0.1"])
def test_another_address_demands_a_key(tmp_path: Path, host: str) -> None:
    done, arguments = launch(tmp_path, HOST=host)
    assert done.returncode == 2 and arguments == []
    assert done.stderr.count("\n") == 1 and f"HOST={host}" in done.stderr and "SGLANG_API_KEY" in done.stderr
    done, arguments = launch(tmp_path, HOST=host, SGLANG_API_KEY="secret")
    assert done.returncode == 0 and after(arguments, "--host") == host
    assert after(arguments, "--api-key") == "secret" and "secret" not in done.stdout + done.stderr


@pytest.mark.parametrize("arguments", [("--host", "0.0.0.0"), ("--host=0.0.0.0",), ("--hos", "::")])
def test_no_argument_goes_round_the_check(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    done, recorded = launch(tmp_path, *arguments)
    assert done.returncode == 2 and recorded == []
    assert done.stderr.count("\n") == 1 and "HOST=ADDRESS" in done.stderr


def test_block_drafts_take_the_same_server(tmp_path: Path) -> None:
    _, heads = launch(tmp_path)
    assert after(heads, "--speculative-algorithm") == "NEXTN"
    done, arguments = launch(tmp_path, script=BLOCKS, DRAFT="/drafter")
    assert done.returncode == 0, done.stderr
    assert after(arguments, "--model-path") == "/checkpoint" and after(arguments, "--host") == "127.0.0.1"
    assert after(arguments, "--speculative-algorithm") == "DFLASH"
    assert after(arguments, "--speculative-draft-model-path") == "/drafter"
    assert "--disable-overlap-schedule" in arguments
    assert not {"--speculative-num-steps", "--speculative-use-rejection-sampling"} & set(arguments)
    done, arguments = launch(tmp_path, script=BLOCKS, DRAFT="/drafter", HOST="0.0.0.0")
    assert done.returncode == 2 and arguments == []


def test_block_drafts_are_refused_without_a_gpu(tmp_path: Path) -> None:
    done, arguments = launch(tmp_path, script=BLOCKS, stubbed=NO_GPU, DRAFT="/drafter")
    assert done.returncode == 2 and arguments == []
    assert done.stderr.count("\n") == 1 and "needs CUDA" in done.stderr
    done, _ = launch(tmp_path, script=BLOCKS)
    assert done.returncode != 0 and "DRAFT" in done.stderr
