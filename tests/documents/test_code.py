"""Every block of code in the pages works: Python is run, commands are parsed or composed for real.

``make test`` has the shortest block of each language, ``make test-slow`` all the others.
"""

import ast
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from bebop.config.job import TaskConfig
from tests.cases import slow_but
from tests.documents.commands import Wrong, check, commands, whole_history
from tests.documents.pages import COMMANDS, Block, blocks, pages
from tests.stored_answers import opened, write
from tests.tree import ROOT

TEXT = "text"  # pseudo-code and output: nothing to run, so no command may stand in it
STARTS = ("bebop ", "python ", "make ", "torchrun ", "bash ", "pip ")
ALL = [block for page in pages() for block in blocks(page, (ROOT / page).read_text())]
BY_LENGTH = sorted(ALL, key=lambda block: (len(block.text), str(block)))
SHORTEST = list({block.language: block for block in reversed(BY_LENGTH)}.values())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with what the pages call DIR (a checkpoint), RUN and HEAD (runs) and files of questions."""
    checkpoint = ROOT / "bebop/model/tiny"
    for name in ("RUN", "HEAD"):
        (tmp_path / name).mkdir()
    for name in ("DIR", "SMALLER", "RUN/model", "HEAD/model"):
        (tmp_path / name).symlink_to(checkpoint)
    for name in ("train.jsonl", "test.jsonl", "questions.jsonl", "text.jsonl"):
        (tmp_path / name).write_text('{"question": "1 + 1 =", "answer": "2", "prompt": "1 + 1 ="}\n')
    rewards = (
        "def correct(text, item):\n    return 1.0\n",
        "def brief(text, item):\n    return float(len(text) < 20)\n",
    )
    (tmp_path / "reward.py").write_text("\n\n".join(rewards))
    log = opened(tmp_path / "RUN")
    write(log, 1)
    log.close()
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
    elif block.language == "yaml":  # a file of the group task, or agent loops of verl
        content = yaml.safe_load(block.text)
        check_loops(content) if isinstance(content, list) else TaskConfig(**content)
    elif block.language == TEXT:
        for line in block.text.splitlines():
            if line.strip().startswith(STARTS):
                raise Wrong(f"{block}: {line.strip()!r} is a command: call the language bash")
    else:
        raise Wrong(f"{block}: no test knows the language {block.language!r}")


def check_loops(loops: list[dict[str, Any]]) -> None:
    """Each class is there, and takes what it is given; read, since it is verl that imports it."""
    for loop in loops:
        module, _, name = loop["_target_"].rpartition(".")
        found = find_spec(module)
        if found is None or found.origin is None:
            raise Wrong(f"there is no module {module}")
        nodes = {node.name: node for node in ast.parse(Path(found.origin).read_text()).body if hasattr(node, "name")}
        if name not in nodes:
            raise Wrong(f"{module} has no {name}")
        functions = {node.name: node for node in nodes[name].body if isinstance(node, ast.FunctionDef)}
        allowed = {argument.arg for argument in functions["__init__"].args.kwonlyargs} | {"name", "_target_"}
        if unknown := sorted(loop.keys() - allowed):
            raise Wrong(f"{name} takes no {', '.join(unknown)}")


@pytest.mark.parametrize("block", slow_but(SHORTEST, ALL), ids=str)
def test_a_block_works(block: Block, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_block(block, folder, monkeypatch)


SCRIPTS = [script for engine in ("sglang", "vllm") for script in sorted((ROOT / "recipes" / engine).glob("*.sh"))]


@pytest.mark.parametrize("script", slow_but(SCRIPTS[:1], SCRIPTS), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_a_launch_script_starts_what_there_is(script: Path, folder: Path) -> None:
    given = {"MODEL": "DIR", "WORKERS": "2", "RANKS": "2"} | ({"DRAFT": "DIR"} if script.name == "dflash.sh" else {})
    check([*(f"{name}={value}" for name, value in given.items()), "bash", str(script.relative_to(ROOT))], folder)


FAULTS: Mapping[str, tuple[str, str]] = {  # a page, and what is said of it
    "a language that nobody knows": ("```cobol\nDISPLAY 1.\n```\n", "no test knows the language 'cobol'"),
    "a fence without a language": ("```\nmake test\n```\n", "no test knows the language ''"),
    "a command in a block of text": ("```text\nmake test\n```\n", "'make test' is a command"),
    "Python that fails": (
        "```python\nfrom bebop.trajectory import NoSuchName\n```\n",
        "cannot import name 'NoSuchName'",
    ),
    "Python that is none": ("```python\nx = = 1\n```\n", "invalid syntax"),
    "a block without an end": ("```bash\nmake test\n", "page.md:1: this block does not end"),
    "the second of two lines": ("```bash\nmake test\npython -m bebop.run \\\n    task=none\n```\n", "task=none is not"),
    "an indented block": ("As ever:\n\n    python -m bebop.run decoding=medusa\n", "decoding=medusa is not possible"),
    "a task with a wrong field": (
        "```yaml\nsource: reasoning_gym\nargument: {}\n```\n",
        "unexpected keyword argument 'argument'",
    ),
    "an agent loop with a wrong setting": (
        "```yaml\n- name: played\n  _target_: bebop.verl_job.agent_loop.EnvironmentAgentLoop\n  turns: 3\n```\n",
        "EnvironmentAgentLoop takes no turns",
    ),
    "an agent loop that is not there": (
        "```yaml\n- _target_: bebop.verl_job.agent_loop.Agent\n```\n",
        "bebop.verl_job.agent_loop has no Agent",
    ),
}
COMMANDS_WITH_FAULTS: Mapping[str, str] = {
    "python -m bebop.run trainer.learning_rate=1": "trainer.learning_rate: no such setting",
    "torchrun --processes 8 -m bebop.adapt": "SystemExit",
    "make tests-all": "No rule to make target 'tests-all'",
    'make run ARGS="task=none"': "task=none is not possible",
    "python -m bebop.train": "there is no module bebop.train",
    "python -m bebop.bench rollout --batch-size 1": "unrecognized arguments: --batch-size 1",
    "bash recipes/sglang/two_gpus.sh": "there is no recipes/sglang/two_gpus.sh",
    "bash recipes/sglang/one_gpu.sh": "MODEL: a checkpoint with MTP weights",
    "MODEL=DIR bash recipes/sglang/one_gpu.sh task=none": "task=none is not possible",
    "python -m bebop.run runtime=verl bebop.monitors=false": "bebop.monitors=False is not possible",
    "python -m bebop.run runtime=verl bebop=none": "bebop=none is not one of",
    'pip install -e ".[vllm7]"': "no extra vllm7",
    'pip install "bebop-rl[vllm]"': "is in no index",
    "bebop rum": "bebop rum: no such command; did you mean run?",
    "bebop run task=none": "task=none is not possible",
    "trl grpo": "no test knows the program 'trl'",
    "python -m pytest tests/none": "tests/none does not exist",
}
COMPOSED: Mapping[str, str] = {  # a configuration each, as the first of those above
    "python -m bebop.run rollout.staleness=-1": "rollout.staleness=-1 is not possible",
    "torchrun --nproc-per-node 8 -m bebop.adapt head.objective=none": "head.objective='none' is not possible",
    "python -m bebop.bench loop trainer.steps=none": "trainer.steps='none' is not possible",
}


def page_of(commands: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    return {f"`{line}`": (f"```bash\n{line}\n```\n", said) for line, said in commands.items()}


QUICK, EVERY = FAULTS | page_of(COMMANDS_WITH_FAULTS), FAULTS | page_of({**COMMANDS_WITH_FAULTS, **COMPOSED})


@pytest.mark.parametrize(("text", "said"), slow_but(QUICK.values(), EVERY.values(), several=True), ids=list(EVERY))
def test_a_planted_fault_is_noticed(text: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((Exception, SystemExit)) as raised:
        for block in blocks("page.md", text):
            run_block(block, folder, monkeypatch)
    assert said in f"{raised.type.__name__}: {raised.value}"


@pytest.mark.skipif(not whole_history(), reason="no git history, or a shallow one")
def test_a_commit_that_is_none_is_noticed(tmp_path: Path) -> None:
    check(["git", "show", "--stat", "HEAD"], tmp_path)
    with pytest.raises(Wrong, match="bad object"):
        check(["git", "show", "--stat", "1" * 40], tmp_path)
