"""Files of the example job: ``python -m bebop.verl_job.example FOLDER`` writes model, tokenizer and questions.

The questions are those of ``bebop.run``'s chain_sum. The tokenizer has its own folder: from the model's folder verl
would use the tokenizer class of its family. And verl drops special tokens from completions, which <answer> and
</answer> would be.
"""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bebop.command import run_main
from bebop.errors import UserError
from bebop.model.checkpoint import resolve
from bebop.tasks.procedural import ProceduralItems

TASK = "chain_sum"
ARGUMENTS = {
    "min_terms": 8,
    "max_terms": 11,
    "min_digits": 1,
    "max_digits": 1,
}  # what the built-in model was trained on


def write_example(folder: Path, train: int = 4096, test: int = 64) -> None:
    """Write all files; overwrite existing ones."""
    tiny = resolve("tiny")
    shutil.copytree(tiny, folder / "model", dirs_exist_ok=True)
    _write_tokenizer(tiny, folder / "tokenizer")
    write_questions(folder / "train.parquet", 0, train)
    write_questions(folder / "test.parquet", train, test)


def write_questions(path: Path, first: int, count: int) -> None:
    """Write items ``first``, ``first`` + 1, ... of the stream in the format of verl's data sets."""
    items = ProceduralItems(TASK, ARGUMENTS, seed=0)
    rows = [_row(index, items.item(index)) for index in range(first, first + count)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def _row(index: int, item: dict[str, Any]) -> dict[str, Any]:
    return {
        "data_source": TASK,
        "prompt": [{"role": "user", "content": item["question"]}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(item["answer"])},
        "extra_info": {"index": index, "item": json.dumps(item)},
    }


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Write the built-in model's tokenizer, with the generic class and the answer tags as ordinary tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    for token in tokenizer["added_tokens"]:
        if "answer" in token["content"]:
            token["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((source / "tokenizer_config.json").read_text())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    settings.pop("extra_special_tokens", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copy(source / "chat_template.jinja", folder)


def main(arguments: list[str]) -> int:
    """Write the example and return the exit code."""
    if len(arguments) != 1 or arguments[0].startswith("-"):
        raise UserError("give one folder: python -m bebop.verl_job.example FOLDER")
    write_example(Path(arguments[0]))
    sys.stderr.write(f"written: {arguments[0]}\n")
    return 0


if __name__ == "__main__":
    run_main(main)
