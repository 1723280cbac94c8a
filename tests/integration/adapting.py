"""An adaptation whose corpus a real engine samples, and what its head then drafts in that engine."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch

from bebop.adapt import main
from bebop.adaptation.corpus import CORPUS, HELD_OUT, read_corpus
from bebop.rollout.served_engine import ServedEngine
from bebop.trainer.chains import TokenRow
from bebop.trajectory import DecodeStats
from tests.served_models import answers, ask, stock
from tests.tiny_families import write_family

ROWS, HELD, DRAFTED = 96, 8, 24
WIDE = {"mimo": {"num_attention_heads": 2}}  # vLLM's attention on a CPU takes heads of 32 numbers, not of 16
SETTINGS = (
    "model.device=cpu", "task=gcd", f"data.sequences={ROWS}", f"data.slots={ROWS}", "data.max_length=80",
    "data.sampling.max_new_tokens=24", "data.sampling.temperature=0.8", f"evaluation.prompts={HELD}",
    "evaluation.draft_tokens=2", "train.rows_per_step=24", "train.steps=60", "train.warm_steps=0", "train.eval_every=0",
    "train.threads=1", "head.depth=1", "head.lr=0.02", "head.lr_warmup_steps=0", "head.objective=ce",
    "tensorboard=false", "progress=false",
)  # fmt: skip


@torch.no_grad()
def check_distribution(folder: Path, rows: list[TokenRow], temperature: float) -> None:
    """Hold a corpus against the model's distribution at a temperature: log p(x) has the mean -H of each place."""
    gaps: list[float] = []
    for row in rows:
        logits = stock(folder)(torch.tensor([row.token_ids])).logits[0, len(row.prompt) - 1 : -1]
        logs = (logits / temperature).log_softmax(-1)
        means = (logs.exp() * logs).sum(-1)
        gaps += (logs.gather(1, torch.tensor(row.answer)[:, None])[:, 0] - means).tolist()
    assert abs(np.mean(gaps)) < 4 * np.std(gaps) / len(gaps) ** 0.5, "the corpus is of another distribution"


def corpus_test(
    name: str, family: str, folder: Path, engine: Callable[[Path], AbstractContextManager[ServedEngine]], *more: str
) -> None:
    """``name`` samples a corpus, a head is trained on it, and its checkpoint drafts better in the same engine."""
    before, run = write_family(folder / "before", family, **WIDE.get(family, {})), folder / "run"
    arguments = [*SETTINGS, f"model.path={before}", f"dir={run}", f"data.engine={name}", *more]
    assert main(arguments) == 0
    rows, held_out = read_corpus(run / CORPUS), read_corpus(run / HELD_OUT)
    assert len(rows) == ROWS and len(held_out) == HELD
    check_distribution(before, [*rows, *held_out], 0.8)
    hotter = False
    try:
        check_distribution(before, [*rows, *held_out], 1.0)
    except AssertionError:
        hotter = True
    assert hotter, "the test would notice another temperature"
    found = json.loads((run / "results.json").read_text())
    assert found["rows"] == ROWS and found["steps"] == 60

    def accept_length(place: Path) -> float:
        with engine(place) as served:
            drafted = answers(served, ask(DRAFTED, 24, temperature=0.8, prompt=rows[0].prompt))
        return DecodeStats.total(one.stats for one in drafted).accept_length

    assert accept_length(run / "model") > accept_length(before) + 0.05, "the served head is the adapted one"
