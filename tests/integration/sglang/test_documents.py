"""The server that the launch file starts is given arguments that SGLang has."""

import argparse
import shlex
from pathlib import Path

import pytest
from sglang.srt.server_args import ServerArgs

from tests.documents.commands import started
from tests.documents.pages import lines_of


def test_sglang_takes_the_arguments_of_the_launch_file(tmp_path: Path) -> None:
    given = started(["recipes/sglang/server.sh"], {"MODEL": "DIR", "TP": "2", "K": "4"}, tmp_path)
    assert given[:2] == ["-m", "sglang.launch_server"]
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    options = parser.parse_args(given[2:])
    assert (options.model_path, options.speculative_algorithm, options.speculative_num_steps) == ("DIR", "NEXTN", 4)
    with pytest.raises(SystemExit):
        parser.parse_args([*given[2:], "--speculative-steps", "4"])


def test_sglang_takes_those_of_block_drafts(tmp_path: Path) -> None:
    given = started(["recipes/sglang/dflash.sh"], {"MODEL": "DIR", "DRAFT": "OTHER"}, tmp_path)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    options = parser.parse_args(given[2:])
    assert (options.model_path, options.speculative_draft_model_path) == ("DIR", "OTHER")
    assert (options.speculative_algorithm, options.speculative_num_draft_tokens) == ("DFLASH", None)


def test_sglang_takes_the_options_of_slime() -> None:
    (line,) = lines_of("recipes/adopt/README.md", "slime")
    parser = argparse.ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    words = [word.replace("--sglang-", "--") for word in shlex.split(line)]  # slime hands them on without its prefix
    options = parser.parse_args(["--model-path", "DIR", *words])
    assert (options.speculative_algorithm, options.speculative_use_rejection_sampling) == ("EAGLE", True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--model-path", "DIR", *words[:-1], "--speculative-rejection-sampling"])
