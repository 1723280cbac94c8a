"""A working folder with files, models and runs that are wrong, each in its way; most are made when asked for."""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bebop.config.compose import as_yaml, job_config
from bebop.model.checkpoint import resolve
from bebop.run_dir.checkpoints import seal
from tests.bad_input.damaged_files import LOGS, METRICS, RESUMED, ROWS, RUN_FILES
from tests.bad_input.damaged_models import CONFIGS, TEXTS, WEIGHTS

FILES = {
    "rows.txt": "text\n",
    "rows.jsonl": '{"question": "1+1", "answer": "2"}\n',
    "empty.jsonl": "",
    "torn.jsonl": '{"question": "1+',
    "torn.parquet": "PAR1",
    "reward.py": "def f(text, item):\n    return 0.0\n",
    "rewards.py": """
def either(*args, **kwargs): return 1.0
def alone(text): return 1.0
def short(completions): return []
def state(completions, trainer_state): return [1.0]
def named(text, item): return {"a b": 1.0}
def taken(text, item): return {"mean": 1.0}
def never(completions): return [None]
async def late(text, item): raise RuntimeError("no")
""",
    "raises.py": "raise RuntimeError('no')\n",
    "syntax.py": "def f(:\n",
    "exits.py": "raise SystemExit(3)\n",
    "number.py": "f = 7\n",
}
STEP = '{"step": 1, "reward/mean": 0.5}\n'
DAMAGED = re.compile(r"\{(rows|log|metrics|run|resumed|model):([\w-]+)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkingFolder:
    """The working folder, and the words that stand in braces in the tables."""

    folder: Path
    words: Mapping[str, str]

    def put(self, text: str) -> str:
        """``text`` with the words put in: ``{here}``, ``{port}``, ``{tiny}``, and ``{model:NAME}`` for what is made."""
        for name, value in self.words.items():
            text = text.replace("{" + name + "}", value)
        return DAMAGED.sub(lambda found: self.made(found[1], found[2]), text)

    def made(self, kind: str, name: str) -> str:
        """The path in the working folder of something of ``tests.bad_input.damage``."""
        path = self.folder / f"{kind}-{name}"
        path = path.with_suffix(".jsonl") if kind in ("rows", "log") else path
        if not path.exists():
            MAKERS[kind](path, name)
        return path.name


@contextmanager
def working_folder(here: Path) -> Iterator[WorkingFolder]:
    """Fill ``here``. The port is taken until the end."""
    here.mkdir()
    for name, text in FILES.items():
        (here / name).write_text(text)
    runs(here)
    models(here)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        words = {"here": str(here), "port": str(taken.getsockname()[1]), "tiny": str(resolve("tiny"))}
        yield WorkingFolder(folder=here, words=words)


def runs(here: Path) -> None:
    """Folders that are runs, or nearly."""
    for name, metrics in {"used": '{"step": 1}\n', "garbled": "nonsense\n{}\n"}.items():
        (here / name).mkdir()
        (here / name / "metrics.jsonl").write_text(metrics)
    (here / "empty").mkdir()


def models(here: Path) -> None:
    """Checkpoints."""
    for name in ("torn", "headless", "strange", "unread", "wordless", "large"):
        shutil.copytree(resolve("tiny"), here / name)
    weights = here / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    without_head(here / "headless" / "model.safetensors")
    change(here / "strange" / "config.json", {"model_type": "warp"})
    (here / "unread" / "config.json").write_text("{")
    for file in (here / "wordless").glob("tokenizer*"):
        file.unlink()
    change(here / "large" / "config.json", {"vocab_size": 4})
    (here / "adapter").mkdir()
    (here / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')


def model(path: Path, name: str) -> None:
    """The built-in model with one thing wrong; what is not changed is linked."""
    shutil.copytree(resolve("tiny"), path, copy_function=os.symlink)
    if name in CONFIGS:
        whole = {entry: path / entry for entry in ("config.json",)}
    elif name in TEXTS:
        whole = {TEXTS[name][0]: path / TEXTS[name][0]}
    else:
        whole = {"model.safetensors": path / "model.safetensors", "tokenizer.json": path / "tokenizer.json"}
    for entry, file in whole.items():
        file.unlink(missing_ok=True)
        shutil.copy(resolve("tiny") / entry, file)
    if name in CONFIGS:
        change(path / "config.json", CONFIGS[name])
    elif name in TEXTS:
        (path / TEXTS[name][0]).write_bytes(TEXTS[name][1])
    else:
        WEIGHTS[name](path)


def run_folder(path: Path, file: str, content: bytes) -> None:
    """A run of one step with one file that is wrong."""
    path.mkdir()
    (path / "metrics.jsonl").write_text(STEP)
    (path / file).write_bytes(content)


def resumed(path: Path, name: str) -> None:
    """A run that is to go on."""
    path.mkdir()
    for file, content in RESUMED[name].items():
        (path / file).parent.mkdir(exist_ok=True)
        (path / file).write_bytes(content)
    if name.startswith(("config-", "identity-")):  # these are looked at once there is something to go on from
        if name.startswith("identity-"):
            config = job_config([f"runtime.dir={path}", "runtime.resume=true"])
            (path / "config.yaml").write_text(as_yaml(config))
        checkpoint(path, {"loop.json": b"{}"})


def checkpoint(run: Path, files: Mapping[str, bytes]) -> None:
    """One that is whole, of these files."""
    folder = run / "checkpoints" / "step_000001"
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    seal(folder)


MAKERS: dict[str, Callable[[Path, str], object]] = {
    "rows": lambda path, name: path.write_bytes(ROWS[name]),
    "log": lambda path, name: path.write_bytes(LOGS[name]),
    "metrics": lambda path, name: run_folder(path, "metrics.jsonl", METRICS[name]),
    "run": lambda path, name: run_folder(path, *RUN_FILES[name]),
    "resumed": resumed,
    "model": model,
}


def without_head(file: Path) -> None:
    """Leave out the weights of the MTP head."""
    from safetensors.torch import load_file, save_file

    save_file({k: v for k, v in load_file(file).items() if "mtp" not in k}, file, metadata={"format": "pt"})


def change(file: Path, values: Mapping[str, object]) -> None:
    """Put other values into a JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
