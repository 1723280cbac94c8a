"""Evaluation of trained heads on held-out prompts: chain by chain, at several temperatures.

Every head is evaluated on the same text: completions of test prompts, and of kinds of prompts that no head was trained
on. The text was sampled at temperature 1, so the estimate of the accept length is unbiased only there. At other
temperatures, overlaps and entropies are those of the contexts in the text. Drafts with a temperature of their own use
the same text with the target at 1, so their estimate is unbiased at every draft temperature (``looks.py``).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.adaptation.probe import NUMBERS, Probe
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.heads import BEST, load_head
from recipes.reproduce.real.looks import Drafts, look
from recipes.reproduce.real.runs import BRIEF, LAST, SHARED, HeadRun
from recipes.reproduce.real.states import Text
from recipes.reproduce.study import QUICK

EVERY = 2 if QUICK else 32  # every n-th chain is evaluated
HELD_OUT = ("test", "unseen")  # splits
TEMPERATURES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)
TOP_P = 0.9
SWEPT = ("hard_ce", "ce", "e2e_tv")  # losses evaluated at every temperature; all others at 1
DRAFT_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the draft alone; 0 is greedy
DRAFTED = ("ce", "e2e_tv")  # losses whose heads are evaluated at draft temperatures


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Evaluation of one head at one sampling on one split.

    Example: Evaluated(head="e2e_tv-0", file="best.safetensors", split="test", ...).
    """

    head: str  # name of its run
    file: str  # of its folder: the best head, or one at a mark
    sampling: Sampling
    split: str

    @property
    def name(self) -> str:
        """Return the file name without its ending: e2e_tv-0, best, T0.40, test."""
        cut = f" p{self.sampling.target_top_p:.2f}" if self.sampling.target_top_p < 1 else ""
        return f"{self.head}, {Path(self.file).stem}, T{self.sampling.temperature:.2f}{cut}, {self.split}"

    def path(self, place: Path) -> Path:
        """Return the file that stores the chains."""
        return place / "evaluation" / f"{self.name}.npz"


def samplings(run: HeadRun, file: str) -> list[Sampling]:
    """Return the samplings at which a head is evaluated.

    The shared head and the best heads of swept losses get all temperatures and top-p. All other heads, fresh ones
    included, get temperature 1 alone.
    """
    plain = Sampling()
    if file != BEST or run.name.startswith("fresh-") or (run.name != SHARED and run.objective not in SWEPT):
        return [plain]
    return [*(Sampling(temperature=t) for t in TEMPERATURES), Sampling(target_top_p=TOP_P)]


def wanted(run: HeadRun, place: Path) -> Iterator[Evaluated]:
    """Yield the evaluations of a finished run: of its best head, and of its heads at marks.

    Unseen kinds of prompts are for best heads at temperature 1 alone. The other evaluations compare heads, and the test
    split suffices for that.
    """
    for path in sorted(run.folder(place).glob("*.safetensors")):
        if not _counts(run, path.name):
            continue
        for sampling in samplings(run, path.name):
            for split in HELD_OUT if path.name == BEST and sampling == Sampling() else HELD_OUT[:1]:
                yield Evaluated(head=run.name, file=path.name, sampling=sampling, split=split)


def _counts(run: HeadRun, file: str) -> bool:
    """Return whether a rule or a table needs this head.

    The shared run needs only its best head. Losses compared after equal steps need that and the last mark of steps. All
    other runs need every mark.
    """
    if run.name == SHARED:
        return file == BEST
    return run.objective not in (*BRIEF, "kl") or file in (BEST, f"step-{LAST:05d}.safetensors")


def evaluate(runs: Sequence[HeadRun], place: Path, model: Policy, text: Text) -> list[dict[str, Any]]:
    """Evaluate every head of finished runs that has no results yet.

    Returns the lines of the table, which are also written to ``evaluation.json``.

    Raises:
        UserError: No head has finished training.
    """
    asked = [(run, each) for run in runs for each in wanted(run, place)]
    if not asked:
        raise UserError(f"{place / 'heads'} holds no head that has ended: run --stage heads first")
    parts = {split: text.only(split) for split in HELD_OUT}
    for run, file, split in tqdm(
        list(dict.fromkeys((r, e.file, e.split) for r, e in asked)), "evaluation", unit="look"
    ):
        own = [each for r, each in asked if (r, each.file, each.split) == (run, file, split)]
        look_at(run, own, place, model, parts[split])
    lines = [line(run, each, read_chains(each.path(place))) for run, each in asked]
    scratch = place / "evaluation" / "evaluation.json.new"
    scratch.write_text(json.dumps(lines, indent=1) + "\n")
    scratch.replace(scratch.with_suffix(""))
    return lines


def look_at(run: HeadRun, asked: Sequence[Evaluated], place: Path, model: Policy, text: Text) -> None:
    """Run the missing evaluations of one head on one split, all from the same logits."""
    head = asked[0]
    left = [each for each in asked if not each.path(place).is_file()]
    drafts = drafts_path(place, run.name) if has_drafts(run, head) else None
    drafts = None if drafts is not None and drafts.is_file() else drafts
    if not left and drafts is None:
        return
    load_head(model, run.folder(place) / head.file, run.name)
    probes, cold = look(
        model, [answer.row for answer in text.answers], run.depth, [each.sampling for each in left], text.states, EVERY,
        DRAFT_TEMPERATURES if drafts is not None else (),
    )  # fmt: skip
    for each, found in zip(left, probes, strict=True):
        write_chains(each.path(place), found, text)
    if drafts is not None:
        write_drafts(drafts, cold)


def has_drafts(run: HeadRun, head: Evaluated) -> bool:
    """Return whether a head is evaluated at separate draft temperatures."""
    begun = run.start == SHARED and run.objective in DRAFTED
    return begun and (head.file, head.split) == (BEST, HELD_OUT[0])


def drafts_path(place: Path, head: str) -> Path:
    """Return the file of a best head's chains with draft temperatures: ce-0, best, drafts, test.npz."""
    return place / "evaluation" / f"{head}, {Path(BEST).stem}, drafts, {HELD_OUT[0]}.npz"


def write_drafts(path: Path, found: Drafts) -> None:
    """Write chains with draft temperatures, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(".new")
    columns = {name: getattr(found, name) for name in Drafts.__slots__}
    columns |= {name: columns[name].astype(np.float32) for name in ("overlap", "accept")}
    with scratch.open("wb") as file:
        np.savez_compressed(file, **columns)
    scratch.replace(path)


def read_drafts(path: Path) -> Drafts:
    """Read the file of ``write_drafts``."""
    with np.load(path) as kept:
        columns = {name: kept[name] for name in Drafts.__slots__}
    columns |= {name: columns[name].astype(float) for name in ("overlap", "accept")}
    return Drafts(**columns | {"temperatures": tuple(columns["temperatures"].tolist())})


def write_chains(path: Path, found: Probe, text: Text) -> None:
    """Write the numbers of n chains with K steps, with the prompt and kind of each chain, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    numbers = np.array([answer.number for answer in text.answers])[found.row]
    columns = {name: found.numbers[name].astype(np.float32) for name in NUMBERS}
    scratch = path.with_suffix(".new")
    with scratch.open("wb") as file:
        np.savez_compressed(
            file, row=found.row, place=found.place, task=found.task, number=numbers, accept=found.accept,
            accept_greedy=found.accept_greedy, **columns,
        )  # fmt: skip
    scratch.replace(path)


def read_chains(path: Path) -> Probe:
    """Read the file of ``write_chains``."""
    with np.load(path) as kept:
        return Probe(
            row=kept["row"], place=kept["place"], task=kept["task"], accept=kept["accept"],
            accept_greedy=kept["accept_greedy"], numbers={name: kept[name].astype(float) for name in NUMBERS},
        )  # fmt: skip


def line(run: HeadRun, each: Evaluated, found: Probe) -> dict[str, Any]:
    """Return one line of the table: means over chains, with intervals over prompts."""

    def mean(values: Any) -> Mapping[str, float]:
        return asdict(found.mean(values))

    overlaps = {f"overlap {k + 1}": mean(found.numbers["overlap"][:, k]) for k in range(run.depth)}
    greedy = {f"greedy {k + 1}": mean(found.numbers["target_only"][:, k]) for k in range(run.depth)}
    names = ("draft_entropy", "target_entropy", "kl_pq", "alpha_p_gt_q", "alpha_q_ge_p")
    return {
        "head": run.name, "objective": run.objective, "seed": run.seed, "start": run.start, "at": Path(each.file).stem,
        "temperature": each.sampling.temperature, "top_p": each.sampling.target_top_p, "split": each.split,
        "chains": len(found.row), "accept length": mean(found.accept),
        "accept length, greedy": mean(found.accept_greedy), **overlaps, **greedy,
        **{name: mean(found.numbers[name][:, 0]) for name in names},
    }  # fmt: skip
