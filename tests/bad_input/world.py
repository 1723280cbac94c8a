"""A working folder with files, models and runs that are wrong, each in its way."""

import json
import shutil
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bebop.model.checkpoint import resolve

FILES = {
    "rows.txt": "text\n",
    "rows.jsonl": '{"question": "1+1", "answer": "2"}\n',
    "empty.jsonl": "",
    "torn.jsonl": '{"question": "1+',
    "torn.parquet": "PAR1",
    "reward.py": "def f(text, item):\n    return 0.0\n",
    "raises.py": "raise RuntimeError('no')\n",
}


@contextmanager
def world(here: Path) -> Iterator[dict[str, str]]:
    """Fill ``here``; the words that stand in braces in the tables. The port is taken until the end."""
    here.mkdir()
    for name, text in FILES.items():
        (here / name).write_text(text)
    runs(here)
    models(here)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield {"here": str(here), "port": str(taken.getsockname()[1]), "tiny": str(resolve("tiny"))}


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


def without_head(file: Path) -> None:
    """Leave out the weights of the MTP head."""
    from safetensors.torch import load_file, save_file

    save_file({k: v for k, v in load_file(file).items() if "mtp" not in k}, file, metadata={"format": "pt"})


def change(file: Path, values: Mapping[str, object]) -> None:
    """Put other values into a JSON object."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))
