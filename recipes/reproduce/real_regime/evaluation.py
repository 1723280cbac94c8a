"""How heads draft on rollouts of the test's prompts, at the temperature of training and at others.

Each temperature has rollouts of its own, and both distributions are taken at it, so the estimate of the accept length
is unbiased everywhere (SPEC 0.6, last form). Chains that end before their fifth step are left out: every position is
then a mean over the same chains, and the acceptance of three drafts is that of three drafts.
"""

import dataclasses
import io
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bebop.adaptation.probe import Probe, probe
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.rollout.torch_engine import TorchEngine
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.prompts import RealPrompt
from recipes.reproduce.real_regime.plan import (
    DEPTH,
    DRAFTS,
    RUNS,
    SHARED,
    SWEPT,
    TEMPERATURES,
    TRAINED_AT,
    Form,
)
from recipes.reproduce.real_regime.rollouts import kept_states, of_split, sampled, test_requests

TEST, UNSEEN = "test", "unseen"  # splits
POSITIONS = ("overlap", "target_only", "target_entropy", "draft_entropy")  # of a probe, by position
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """Look(head="e2e_tv-0", temperature=0.5, split="test"): a head on one text."""

    head: str
    temperature: float
    split: str

    @property
    def name(self) -> str:
        """Return the name of its entry in the archive."""
        return f"{self.head}, T{self.temperature:.2f}, {self.split}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """Rollouts to evaluate heads on, with the backbone's states [P + T, d] of each."""

    rows: Sequence[TokenRow]
    states: Sequence[Tensor]
    stopped: float  # share of completions that ended by themselves


def wanted() -> Iterator[Look]:
    """Yield all looks, those that most rules ask for first."""
    names = [SHARED, *(run.name for run in RUNS)]
    swept = [SHARED, *(run.name for run in RUNS if run.objective in SWEPT)]
    yield from (Look(head=name, temperature=TRAINED_AT, split=TEST) for name in names)
    for temperature in TEMPERATURES:
        if temperature != TRAINED_AT:
            yield from (Look(head=name, temperature=temperature, split=TEST) for name in swept)
    yield from (Look(head=name, temperature=TRAINED_AT, split=UNSEEN) for name in names)


def texts(form: Form, engine: TorchEngine, prompts: Sequence[RealPrompt], place: Path) -> dict[tuple[float, str], Text]:
    """Return the texts by temperature and split, sampled now unless they are kept in ``place``."""
    found = {}
    for temperature, split in dict.fromkeys((look.temperature, look.split) for look in wanted()):
        most = form.swept_prompts if temperature != TRAINED_AT else form.test_prompts
        most = form.unseen_prompts if split == UNSEEN else most
        asked = test_requests(of_split(prompts, split, most), temperature)
        path = place / "texts" / f"T{temperature:.2f}-{split}.jsonl" if form.resumable else None
        answers = sampled(form, engine, asked, path, f"text at {temperature:g}")
        rows = [answer.row for answer in answers]
        states = kept_states(form, engine.policy, rows, path)
        stopped = sum(answer.finish == "stop" for answer in answers) / len(answers)
        found[temperature, split] = Text(rows=rows, states=states, stopped=stopped)
    return found


def look(form: Form, model: Policy, weights: Mapping[str, Tensor], text: Text, temperature: float) -> dict[str, Any]:
    """Return the columns of one look at a head: n chains with five steps each.

    The head is in the model's type, as an engine would hold it.

    Raises:
        UserError: No completion is long enough for a chain of five steps.
    """
    policy = dataclasses.replace(model, mtp=MTPHead(model.backbone))
    assert policy.mtp is not None
    policy.mtp.load_state_dict(weights)
    policy.mtp.eval().requires_grad_(False)
    sampling = Sampling(temperature=temperature)
    found = probe(
        policy, text.rows, DEPTH, sampling, batch=form.states_batch, states=text.states, every=form.test_every
    )
    whole = np.isfinite(found.numbers["overlap"]).all(1)
    if not whole.any():
        raise UserError(f"no completion of the text at temperature {temperature:g} has {DEPTH + 1} tokens")
    columns: dict[str, Any] = {"row": found.row[whole], "task": found.task[whole], "place": found.place[whole]}
    columns |= {name: found.numbers[name][whole].astype(np.float16) for name in POSITIONS}
    reached = {"reached": found.reached, "reached_greedy": found.reached_greedy}
    return columns | {name: values[whole].astype(np.float16) for name, values in reached.items()}


# ---- what is kept: one file for all looks, as a machine that is lent returns few files


class Archive:
    """Looks in one file, which is whole after each of them: entries by name, in the order of writing."""

    def __init__(self, path: Path) -> None:
        """Go on with what is there."""
        self.path = path
        self.entries: dict[str, bytes] = {}
        if path.is_file():
            with zipfile.ZipFile(path) as archive:
                self.entries = {name: archive.read(name) for name in archive.namelist()}

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def add(self, name: str, columns: Mapping[str, Any]) -> None:
        """Keep the columns of a look."""
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **columns)
        self.entries[name] = buffer.getvalue()
        scratch = self.path.with_suffix(".new")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(scratch, "w") as archive:
            for entry, content in self.entries.items():
                archive.writestr(zipfile.ZipInfo(entry), content)
        scratch.replace(self.path)

    def columns(self, name: str) -> dict[str, NDArray[Any]]:
        """Return the columns of a look, numbers in double precision."""
        with np.load(io.BytesIO(self.entries[name]), allow_pickle=False) as found:
            return {
                key: values.astype(float) if values.dtype == np.float16 else values for key, values in found.items()
            }


def chains(columns: Mapping[str, NDArray[Any]], drafts: int = DRAFTS) -> Probe:
    """Return the chains of a look as statistics take them, a number a chain [n, 1].

    ``accept`` and ``accept_greedy``: unbiased estimates of the accept length with ``drafts`` drafts.
    ``target_entropy``: mean over their positions, nats. ``length``, ``greedy``: both estimates once more, for slopes.
    """
    sampled_length = 1 + (columns["reached"] * columns["overlap"])[:, :drafts].sum(1)
    greedy_length = 1 + (columns["reached_greedy"] * columns["target_only"])[:, :drafts].sum(1)
    numbers = {
        "target_entropy": columns["target_entropy"][:, :drafts].mean(1, keepdims=True),
        "draft_entropy": columns["draft_entropy"][:, :drafts].mean(1, keepdims=True),
        "length": sampled_length[:, None], "greedy": greedy_length[:, None],
    }  # fmt: skip
    return Probe(
        row=columns["row"], place=columns["place"], task=columns["task"], numbers=numbers, accept=sampled_length,
        accept_greedy=greedy_length,
    )  # fmt: skip
