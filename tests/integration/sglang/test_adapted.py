"""A checkpoint that bebop.adapt wrote is served as it is, and drafts there as well as in the embedded engine.

SGLang samples the corpus of another, and drafts with the head that was trained on it.
"""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from bebop.adapt import main
from bebop.trajectory import DecodeStats
from tests.integration.adapting import corpus_test
from tests.integration.sglang.builders import engine
from tests.served_models import DRAFTS, PROMPT, answers, ask, checkpoint, embedded, job

SETTINGS = (
    "model=folder", "model.device=cpu", "data.source=file", "data.max_length=100", "data.sampling.max_new_tokens=24",
    "head.depth=2", "head.lr=0.02", "head.objective=ce", "train.steps=40", "train.rows_per_step=32", "train.threads=1",
    "train.eval_every=0", "evaluation.prompts=8", f"evaluation.draft_tokens={DRAFTS}", "progress=false",
    "tensorboard=false",
)  # fmt: skip


def accepted(found: object, count: int = 40) -> DecodeStats:
    return DecodeStats.total(answer.stats for answer in answers(found, ask(count, 16)))


def text(folder: Path, path: Path) -> Path:
    """Answers of the model itself to twenty prompts, ten each: some are held out."""
    source = embedded(folder)
    decode = source.policy.tokenizer.decode
    rows = [
        {"prompt": decode(list(prompt)), "answer": answer.text}
        for prompt in itertools.product((3, 5), range(1, 11))
        for answer in answers(source, ask(10, 24, prompt=(*prompt, PROMPT[-1])))
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_adapted_head_is_served(tmp_path: Path) -> None:
    before = checkpoint(tmp_path / "before")
    data = text(before, tmp_path / "text.jsonl")
    run = tmp_path / "run"
    assert main([*SETTINGS, f"model.path={before}", f"data.path={data}", f"dir={run}"]) == 0
    own, first = accepted(embedded(run / "model")), accepted(embedded(before))
    with engine(job(run / "model")) as sglang:
        theirs = accepted(sglang)
    for k in range(DRAFTS):
        rates = [stats.overlap[k] / stats.reached[k] for stats in (theirs, own)]
        error = np.sqrt(sum(r * (1 - r) / s.reached[k] for r, s in zip(rates, (theirs, own), strict=True)))
        assert abs(rates[0] - rates[1]) < 4 * error, (k, rates)
    gained = theirs.accept_length - first.accept_length
    assert gained > 0.1, "the served head is the adapted one"


@pytest.mark.slow
def test_a_corpus_of_sglang_trains_a_head_that_drafts_there(tmp_path: Path) -> None:
    room = "data.engine_options.cache_tokens=8192"
    corpus_test("sglang", "mimo", tmp_path, lambda folder: engine(job(folder)), room)
