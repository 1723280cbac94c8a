"""Content hashes of a run's inputs: a model's weights and tokenizer, and files of questions."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from bebop.config.job import JobConfig, ModelConfig
from bebop.model.checkpoint import resolve

TOKENIZER = ("tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "chat_template*")
SAMPLE = 4096  # bytes read of each tensor: further training changes all of them
UNREADABLE = ""  # the code that loads the file reports the error
GENERATED = "generated"  # in place of the hash of evaluation.path: the held-out questions come from the task


def job_identity(config: JobConfig) -> dict[str, str]:
    """Return the identity of a job, from its model and its files of questions.

    Generated held-out questions have a mark as well. So no resume exchanges them for a file, or a file for them.
    """
    evaluation = config.evaluation
    own = evaluation.task.get("path") if evaluation.every else None
    files = {"task.path": config.task.path, "evaluation.path": evaluation.path, "evaluation.task.path": own}
    generated = evaluation.every > 0 and evaluation.path is None and own is None
    return identity(config.model, files) | ({"the file evaluation.path": GENERATED} if generated else {})


def identity(model: ModelConfig, files: Mapping[str, str | None]) -> dict[str, str]:
    """Return the SHA-256 of each part, keyed by the part's name in error messages.

    Args:
        model: a model; the names, shapes and first 4 KiB of each of its tensors are hashed.
        files: setting -> path of a file that is hashed whole, or None.
    """
    folder = resolve(model.path)
    tokenizer = sorted({path for pattern in TOKENIZER for path in folder.glob(pattern) if path.is_file()})
    marks = {
        "the tokenizer in model.path": _marked(_files, tokenizer),
        "the architecture (config.json) in model.path": _marked(_files, [folder / "config.json"]),
        "the weights in model.path": _marked(_weights, sorted(folder.glob("*.safetensors"))),
    }
    named = {setting: path for setting, path in files.items() if path}
    return marks | {f"the file {setting}": _marked(_files, [Path(path)]) for setting, path in named.items()}


def _marked(of: Callable[[list[Path]], str], paths: list[Path]) -> str:
    try:
        return of(paths)
    except (OSError, ValueError, KeyError, MemoryError, OverflowError):
        return UNREADABLE


def _files(paths: list[Path]) -> str:
    total = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            name = path.name if len(paths) > 1 else ""  # a single file may be renamed
            total.update(f"{name}:{hashlib.file_digest(file, 'sha256').hexdigest()};".encode())
    return total.hexdigest()


def _weights(paths: list[Path]) -> str:
    """Hash all shards together, tensor by tensor, so that another sharding gives the same hash."""
    marks = sorted(mark for path in paths for mark in _tensors(path))
    return hashlib.sha256("\n".join(marks).encode()).hexdigest()


def _tensors(path: Path) -> Iterator[str]:
    """Yield name, type, shape and the hash of a sample of each tensor in a safetensors file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            begin, end = tensor["data_offsets"]
            file.seek(8 + size + begin)
            content = hashlib.sha256(file.read(min(SAMPLE, end - begin))).hexdigest()
            yield f"{name}:{tensor['dtype']}:{tensor['shape']}:{content}"
