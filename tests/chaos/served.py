"""Jobs whose engine is SGLang, on the CPU: in its environment alone (``make test-sglang`` makes it)."""

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def here() -> None:
    """Make sure that it can run here; processes that are started from now on find what it looks for."""
    if find_spec("sglang") is None:
        raise SystemExit("jobs of SGLang run in its environment: .venv-sglang/bin/python -m tests.chaos --jobs sglang")
    import_module("tests.integration.sglang.conftest")  # it sets what processes inherit


def prepare(folder: Path) -> None:
    """A model that Triton's interpreter can decode with, and its questions."""
    from tests.served_models import checkpoint

    checkpoint(folder / "model")
    rows = [{"question": question, "answer": "a"} for question in ("ab", "ba")]
    (folder / "task.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
