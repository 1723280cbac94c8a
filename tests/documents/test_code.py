"""Every block of code in the pages works: Python is run, commands are parsed or composed for real."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from bebop.config import TaskConfig, from_dict
from tests.documents.commands import Wrong, check, commands
from tests.documents.pages import COMMANDS, Block, blocks, pages
from tests.test_layout import ROOT

TEXT = "text"  # pseudo-code and output: nothing to run, so no command may stand in it
STARTS = ("python ", "make ", "torchrun ", "bash ", "pip ")
ALL = [block for page in pages() for block in blocks(page, (ROOT / page).read_text())]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with what the pages call DIR (a checkpoint), RUN (a run folder) and files of questions."""
    checkpoint = ROOT / "bebop/model/tiny"
    (tmp_path / "RUN").mkdir()
    for name in ("DIR", "RUN/model"):
        (tmp_path / name).symlink_to(checkpoint)
    for name in ("train.jsonl", "questions.jsonl", "text.jsonl"):
        (tmp_path / name).write_text('{"question": "1 + 1 =", "answer": "2", "prompt": "1 + 1 ="}\n')
    return tmp_path


def run_block(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Do with a block what its language says."""
    if block.language == "python":
        monkeypatch.chdir(folder)
        code = compile("\n" * (block.line - 1) + block.text, str(ROOT / block.page), "exec")
        exec(code, {"__name__": "__main__"})
    elif block.language in COMMANDS:
        for words in commands(block.text):
            check(words, folder)
    elif block.language == "yaml":  # a file of the group task
        task = from_dict(TaskConfig, yaml.safe_load(block.text), "task.")
        assert asdict(task)["name"]
    elif block.language == TEXT:
        assert not [line for line in block.text.splitlines() if line.strip().startswith(STARTS)]
    else:
        raise Wrong(f"{block}: no test knows the language {block.language!r}")


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_works(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_block(block, folder, monkeypatch)


@pytest.mark.parametrize("script", sorted((ROOT / "recipes/sglang").glob("*.sh")), ids=lambda path: path.name)
def test_a_launch_script_starts_what_there_is(script: Path, folder: Path) -> None:
    given = {"MODEL": "DIR", "WORKERS": "2", "RANKS": "2"}
    check([*(f"{name}={value}" for name, value in given.items()), "bash", str(script.relative_to(ROOT))], folder)


FAULTS: Mapping[str, str] = {
    "a language that nobody knows": "```cobol\nDISPLAY 1.\n```\n",
    "a fence without a language": "```\nmake test\n```\n",
    "a command in a block of text": "```text\nmake test\n```\n",
    "Python that fails": "```python\nfrom bebop.trajectory import NoSuchName\n```\n",
    "Python that is none": "```python\nx = = 1\n```\n",
    "a setting that is none": "```bash\npython -m bebop.run trainer.learning_rate=1\n```\n",
    "a value out of range": "```bash\npython -m bebop.run rollout.staleness=-1\n```\n",
    "a choice that is none": "```bash\npython -m bebop.run decoding=medusa\n```\n",
    "the same, indented": "As ever:\n\n    python -m bebop.run decoding=medusa\n",
    "the second of two lines": "```bash\nmake test\npython -m bebop.run \\\n    task=none\n```\n",
    "an objective that is none": "```bash\ntorchrun --nproc-per-node 8 -m bebop.adapt head.objective=none\n```\n",
    "an argument of torchrun": "```bash\ntorchrun --processes 8 -m bebop.adapt\n```\n",
    "a target that is none": "```bash\nmake tests-all\n```\n",
    "a wrong argument of a target": '```bash\nmake run ARGS="task=none"\n```\n',
    "a module that is none": "```bash\npython -m bebop.train\n```\n",
    "an option that is none": "```bash\npython -m bebop.bench rollout --batch-size 1\n```\n",
    "a wrong setting of a benchmark": "```bash\npython -m bebop.bench loop trainer.steps=none\n```\n",
    "a script that is none": "```bash\nbash recipes/sglang/two_gpus.sh\n```\n",
    "a script without what it needs": "```bash\nbash recipes/sglang/one_gpu.sh\n```\n",
    "a script with a wrong argument": "```bash\nMODEL=DIR bash recipes/sglang/one_gpu.sh task=none\n```\n",
    "a block of verl's": "```bash\npython -m bebop.run runtime=verl bebop.monitors=false\n```\n",
    "a group of verl's": "```bash\npython -m bebop.run runtime=verl bebop=none\n```\n",
    "an extra that is none": '```bash\npip install "bebop-rl[vllm7]"\n```\n',
    "a program that is none": "```bash\nbebop run\n```\n",
    "a commit that is none": "```bash\ngit show --stat 0000000000000000000000000000000000000001\n```\n",
    "a task with a wrong field": "```yaml\nsource: reasoning_gym\nname: gcd\nargument: {}\n```\n",
    "a block without an end": "```bash\nmake test\n",
}


@pytest.mark.parametrize("text", FAULTS.values(), ids=list(FAULTS))
def test_a_planted_fault_is_noticed(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((Wrong, ValueError, ImportError, SyntaxError, AssertionError, SystemExit)):
        for block in blocks("page.md", text):
            run_block(block, folder, monkeypatch)
