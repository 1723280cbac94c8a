"""Plan of the study: what it trains and measures, and the sizes for a processor, minutes on a GPU, and a smoke run."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from recipes.reproduce.real.open_prompts import KINDS, open_questions
from recipes.reproduce.real_systems import words
from recipes.reproduce.study import QUICK

REWARD = f"{Path(words.__file__)}:all_words"
# One text for FIRP and for block drafts. The papers decode at temperature 0, where SmolLM2 repeats itself; at 1 its
# mean entropy is 2.65 nats, and theirs is below .5. Matrices are trained on text between the two.
OPEN, WORDS, WORD = 0.6, 0.6, 1.0  # temperatures: open questions, two words (PAD), one word (PIPO)
STUDENT = 12  # layers of PIPO's student; its teacher has all 30
PAD = 3  # <repo_name>, absent from all completions: SmolLM2's own pad token ends them
DRAFTS = 3  # K of the MTP head and of look-ups
NODES = 16  # of FIRP's trees
BLOCK = 8  # B, slots of a block in training; a cycle then drafts 7
TAUS = (0.1, 0.3, 0.5, 0.7)  # of PAD
TAU = 0.3  # the one that the rule is about: the default of the product
SHARE = 0.25  # of the candidates that are kept in PAD 3
PAD_RATIO = 0.35  # target of the threshold of a network of pairs: the default of the product
GATES = {"all kept": -1.0, "part": None, "none kept": 1.0}  # of PIPO: a threshold; None: the part's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Model, amount of training and number of rounds: Sizes(model="smollm2", open=1000, ...)."""

    model: str
    device: str
    dtype: str
    open: int  # open questions to train on; a fifth as many are for the test
    pairs: int  # questions with two words, for PAD
    new: Mapping[str, int]  # tokens of a completion at most, by kind of question
    slots: int
    sequences: Mapping[str, int]  # completions that a part learns from
    options: Mapping[str, Mapping[str, Any]]  # of a part's training
    train: Mapping[str, Any]  # ``train`` of every part
    prompts: int  # held-out prompts in a part's own report
    rounds: int
    answers: Mapping[str, int]  # completions per round, by kind of question
    cache_mb: int = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Systems that one sitting can train and measure without the others."""

    parts: tuple[str, ...]
    settings: tuple[str, ...]  # of ``rounds.settings``


GROUPS = {
    "firp": Group(parts=("firp",), settings=("open, greedy", "open, sampled")),
    "block": Group(parts=("block", "block_length"), settings=("blocks, greedy", "blocks, sampled")),
    "pad": Group(parts=("pivot",), settings=("words",)),
    "pipo": Group(parts=("pipo_sft", "pipo_more", "pipo_opd"), settings=("word",)),
}
PARTS = tuple(part for group in GROUPS.values() for part in group.parts)


def native_dtype() -> str:
    """Return bfloat16 if this processor multiplies it by instructions of its own, else float32.

    Without such instructions a product in bfloat16 takes several times as long as one in float32.
    """
    there = getattr(torch.cpu, "get_capabilities", dict)()  # from torch 2.12 on
    return "bfloat16" if any(there.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else "float32"


_CPU = Sizes(
    model="smollm2", device="cpu", dtype=native_dtype(), open=1000, pairs=400, slots=64,
    new={"open": 48, "words": 40, "word": 32},
    sequences={"firp": 400, "pivot": 300, "block": 600, "block_length": 850, "pipo": 900},
    options={
        "firp": {"steps": 240, "rows_per_step": 16, "anchors": 16, "calibration": 32},
        "pivot": {"rollouts": 16, "places": 2, "judge": False, "twice": 0.1, "depth": DRAFTS},
        "block": {"steps": 600, "rows_per_step": 16, "anchors": 8, "block": BLOCK, "layers": 2, "width": 1536,
                  "taps": 4, "lr": 1e-3},
        "block_length": {"smallest": 2, "largest": BLOCK, "temperature": 0.0},
        # Samples that hold the word are kept, some seven of ten.
        "pipo_sft": {"stage": "sft", "layers": STUDENT, "pad": PAD, "steps": 700, "samples": 2, "lr": 5e-4},
        "pipo_more": {"stage": "sft", "layers": STUDENT, "pad": PAD, "steps": 1000, "samples": 2, "lr": 5e-4},
        "pipo_opd": {"stage": "opd", "steps": 300, "rollouts": 96, "lr": 1e-4},
    },
    train={"threads": 1, "steps": 600, "save_every": 20, "keep": 1},
    prompts=48, rounds=8, answers={"open": 2, "words": 24, "word": 48},
)  # fmt: skip
_SMOKE = Sizes(
    model="tiny", device="cpu", dtype="float32", open=20, pairs=30, new={"open": 12, "words": 20, "word": 24}, slots=48,
    sequences={"firp": 8, "pivot": 16, "block": 8, "block_length": 12, "pipo": 12},
    options={
        "firp": {"steps": 2, "rows_per_step": 2, "anchors": 4, "calibration": 4},
        "pivot": {"rollouts": 2, "places": 4, "judge": False, "twice": 0.2, "depth": 2, "tol": 0.01},
        "block": {"steps": 2, "rows_per_step": 2, "anchors": 4, "block": 4, "width": 32, "layers": 1},
        "block_length": {"smallest": 2, "largest": 4, "temperature": 0.0, "steps": 4},
        "pipo_sft": {"stage": "sft", "layers": 4, "steps": 3, "samples": 4, "rows_per_step": 4},
        "pipo_more": {"stage": "sft", "layers": 4, "steps": 4, "samples": 4, "rows_per_step": 4},
        "pipo_opd": {"stage": "opd", "steps": 2, "rollouts": 4, "rows_per_step": 4},
    },
    train={"threads": 1, "steps": 4, "save_every": 2, "keep": 1, "rows_per_step": 8},
    prompts=4, rounds=2, answers={"open": 2, "words": 4, "word": 4}, cache_mb=100,
)  # fmt: skip
SIZES = _SMOKE if QUICK else _CPU
SMOKE, CPU = _SMOKE, _CPU


def questions(sizes: Sizes, test: bool) -> dict[str, list[dict[str, str]]]:
    """Return the questions of each kind, either for training or for the test; none is in both."""
    if sizes.model == "tiny":
        count = sizes.pairs // 2 if test else sizes.pairs
        return {kind: words.sums(test, count) for kind in ("open", "words", "word")}
    return {
        "open": open_rows(sizes.open, test),
        "words": words.two_words(test, sizes.pairs),
        "word": words.one_word(test),
    }


def open_rows(count: int, test: bool) -> list[dict[str, str]]:
    """Return ``count`` open questions of all kinds in turn, or a fifth as many others for the test."""
    per_kind: dict[str, list[str]] = {}
    for kind, (templates, topics) in KINDS.items():
        size = len(templates)
        for topic in topics:
            size *= len(topic)
        per_kind[kind] = open_questions(kind, size, 0)
    most = max(map(len, per_kind.values()))
    mixed = [(kind, own[i]) for i in range(most) for kind, own in per_kind.items() if i < len(own)]
    parts = mixed[::6], [one for i, one in enumerate(mixed) if i % 6]
    chosen = parts[0][: count // 5] if test else parts[1][:count]
    return [{"question": text, "answer": "", "kind": kind} for kind, text in chosen]


def write_questions(folder: Path, sizes: Sizes) -> dict[str, Path]:
    """Write the training questions, one file per kind, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for kind, rows in questions(sizes, test=False).items():
        path = folder / f"{kind}.jsonl"
        text = "".join(json.dumps(row) + "\n" for row in rows)
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
        found[kind] = path
    return found
