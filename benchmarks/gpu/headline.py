"""The headline of *Breaking Entropy Bounds* on one GPU: the gain of drafts for a dense 7B at *planted* acceptance.

The model has random weights, so its head's drafts are accepted far less often than a trained head's. One thing is
therefore planted: how many drafts of a cycle are accepted. All else is the embedded engine's own cycle.

- *Computed*: the passes of the head, draws from its logits, the target's pass, every read of p and q in verification,
  the draws after it, statistics, and the pass of the head over the emitted tokens; as CUDA graphs, launched ahead.
- *Planted*: the uniforms that drafts are tested with. A test that its row of the table lets pass gets 0, one that it
  does not gets infinity, which no p / q exceeds. The kernels read and compute the same as in a job.
- *Cost of the plant*: four small kernels per cycle, so that drafts look slower rather than faster. Nothing is read from
  the device.
- *Only here*: no setting and no decoding system leads to ``PlantedAcceptance``, which only code can put into an engine.
  Its completions are marked as not exact, and a trainer refuses them.
- *Left out*: prefill, contexts above 256 entries, and the tail of a rollout, where few rows run.

Speed is the planted accept length, 1 + E[A], over the measured time of a cycle. The measured accept length is shown
beside it, and a page warns if it is not the planted one. Arms take turns, each from the same prompts on, and a ratio is
within a round.

**The rule, written before anything had run on a GPU.** At each batch with K = 3, at the mean of the five tasks and at
the highest of them in the paper's Table 2 with end-to-end TV: 2.4 times as fast as plain decoding, the paper's number
for rollouts, is *reached* if the 95 % interval over rounds lies above it, *missed* if below, else *open*. That the
acceptance of a mean or of the best task should reach it is our bar; the paper says "up to". It judges the engine, not
the head: whether a head is accepted so often is no part of it.
"""

import gc
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop.bench.gpu.models import DENSE_7B, SHAPES, TINY, Decoding, policy_of, question, update
from bebop.bench.gpu.stage import Context, Row
from bebop.command import run_main
from bebop.errors import UserError
from bebop.metrics.intervals import Interval, across_seeds
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput, takes_logits
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.rules import Rejection
from bebop.rollout.torch_engine import TorchEngine

LABEL = "acceptance planted, text meaningless"
ROLLOUTS, STEPS = 2.4, 1.8  # times as fast, at most, in the paper: rollouts, and steps of asynchronous RL
# Accepted drafts over drafted ones at K = 3, in percent, of arXiv 2606.12370. Table 2: Qwen 35B-A3B.
TABLE_2 = {
    "cross-entropy": {"Math": 75.0, "Code": 71.3, "SWE": 75.1, "Agent": 90.3, "MT-Bench": 65.3},
    "end-to-end TV": {"Math": 78.0, "Code": 74.6, "SWE": 83.1, "Agent": 97.0, "MT-Bench": 67.6},
}
# Its tasks are Math, Code, Hybrid, SWE, Agent, Long, MT-Bench; heads of end-to-end TV (3.7) and of cross-entropy (3.6).
TABLE_3 = {
    "3.7-Max": (87.6, 87.7, 78.1, 81.9, 94.6, 77.2, 73.2),
    "3.7-Plus": (87.4, 85.7, 75.3, 79.2, 98.6, 78.0, 74.3),
    "3.6-Plus": (82.2, 78.7, 72.2, 75.2, 99.1, 75.6, 71.0),
    "3.6-27B": (79.9, 76.7, 71.9, 72.3, 96.3, 69.5, 67.5),
    "3.6-35A3B": (78.3, 74.4, 69.2, 71.3, 97.1, 71.3, 65.2),
}
PAPER_DRAFTS = 3  # K of both tables


# ---- what is planted


@takes_logits
class PlantedAcceptance(Rejection):
    """Rejection sampling whose tests pass with the chances of a table, independent of draft and target."""

    exact = False

    def __init__(self, chances: Tensor) -> None:
        """Set ``chances`` [K] float64 on the device: for each draft, given that those before it are accepted.

        The tensor may be filled with other numbers between two cycles: a graph reads it again each time.
        """
        super().__init__()
        self.chances = chances
        self.passes, self.fails = chances.new_zeros(()), chances.new_full((), torch.inf)

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Judge the drafts of a cycle with uniforms [B, K + 2], of which the first K decide by the table alone."""
        drafts = draft.tokens.shape[1]
        tests = torch.where(uniforms[:, :drafts] < self.chances[:drafts], self.passes, self.fails)
        return super().accept(rows, draft, out, torch.cat([tests, uniforms[:, drafts:]], 1))


def plant(engine: TorchEngine, chances: Tensor) -> None:
    """Put a table of chances [K] into an engine that has run no cycle yet."""
    assert isinstance(engine.decoder, DraftVerify) and engine.decoder.drafter is not None, "it drafts nothing"
    engine.decoder.rule = PlantedAcceptance(chances)


def expected(chance: float, drafts: int) -> float:
    """Return the mean number of accepted drafts, if each is accepted with ``chance`` given those before it."""
    return sum(chance**place for place in range(1, drafts + 1))


def variance(chance: float, drafts: int) -> float:
    """Return the variance of the number of accepted drafts A: E[A^2] is the sum of (2 j - 1) P(A >= j)."""
    second = sum((2 * place - 1) * chance**place for place in range(1, drafts + 1))
    return second - expected(chance, drafts) ** 2


def chance_of(percent: float) -> float:
    """Return the chance of each draft for a percentage of the paper's tables, accepted over drafted at K = 3."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        below = expected(middle, PAPER_DRAFTS) < PAPER_DRAFTS * percent / 100
        low, high = (middle, high) if below else (low, middle)
    return (low + high) / 2


TV = TABLE_2["end-to-end TV"].values()
JUDGED = {"mean of Table 2": statistics.fmean(TV), "highest of Table 2": max(TV)}  # percent
CHANCES = (0.5, 0.7, *(chance_of(one) for one in JUDGED.values()))


# ---- the stage


def headline(context: Context) -> None:
    """Time cycles of a 7B shape at planted acceptance beside plain ones, over K and batch.

    Then time the pair of a rollout and an update, on the largest shape whose update fits.
    """
    name, shape = ("tiny", TINY) if context.dry else ("dense 7B", DENSE_7B)
    context.keep("label", None, text=LABEL, parameters=question(shape, 1, True).model.parameters)
    policy = policy_of(shape, context.device)
    for batch in (2,) if context.dry else (32, 1, 128):  # what matters most comes first
        _grid(context, policy, name, batch, (1, 3) if context.dry else (3, 1, 5), CHANCES, FOR_THE_PAIR)
        _free(context)
    del policy
    _free(context)
    _pair(context)


FOR_THE_PAIR = 0.2  # of the stage's seconds, which no round takes from the pair
ROUNDS, DRY_ROUNDS = 4, 2
CYCLES = 24  # of a visit; with K = 5 contexts stay below 256 entries, so that one graph serves all
PAIR_TOKENS = 4096  # of the update
PAIR_BATCH = 128


def _grid(
    context: Context,
    policy: Policy,
    model: str,
    batch: int,
    lengths: Sequence[int],
    chances: Sequence[float],
    leave: float = 0.0,
) -> None:
    """Keep the milliseconds of cycles: each number of drafts beside plain ones in every round, its chances in turns.

    ``leave``: no further round begins once this share of the stage's seconds is left.
    """
    about: Row = {"model": model, "batch": batch}
    ends = leave * context.seconds
    with context.tried("cycle", **about):
        arms: dict[int, tuple[Decoding, str, Tensor]] = {}
        for drafts in (0, *lengths):
            if context.left < ends:
                break
            arms[drafts] = _engine(context, policy, batch, drafts)
        drafted = [drafts for drafts in arms if drafts]
        for number in range(DRY_ROUNDS if context.dry else ROUNDS):
            turned = drafted[number % len(drafted) :] + drafted[: number % len(drafted)] if drafted else []
            for drafts in turned:
                if context.left < ends:
                    context.keep("cycle", None, skipped="time is up", round=number, K=drafts, **about)
                    continue
                order = [None, *chances]  # None: plain
                for chance in order[:: -1 if number % 2 else 1]:
                    _visit(context, arms, number, drafts, chance, about)


def _free(context: Context) -> None:
    """Release the memory of deleted engines and models: the update of the pair takes most of the card."""
    gc.collect()  # an engine and its parts know one another
    if context.device.type == "cuda":
        torch.cuda.empty_cache()


def _engine(context: Context, policy: Policy, batch: int, drafts: int) -> tuple[Decoding, str, Tensor]:
    """Return an engine in mid-completion, how it launches cycles, and the table of its chances [K].

    It uses CUDA graphs that are launched ahead, if possible; otherwise a row gives the reason.
    """
    chances = torch.ones(max(1, drafts), dtype=torch.float64, device=context.device)
    system = "bebop" if drafts else "autoregressive"

    def prepare(engine: TorchEngine) -> None:
        if drafts:
            plant(engine, chances)

    for how in ("overlapped graphs", "graphs"):
        with context.tried(how, batch=batch, K=drafts):
            graphs = {"graphs": True, "overlap": how.startswith("overlapped"), "prepare": prepare}
            return Decoding(policy, system, drafts, batch, **graphs), how, chances  # type: ignore[arg-type]
    return Decoding(policy, system, drafts, batch, prepare=prepare), "kernel by kernel", chances


def _visit(
    context: Context,
    arms: Mapping[int, tuple[Decoding, str, Tensor]],
    number: int,
    drafts: int,
    chance: float | None,
    about: Row,
) -> None:
    """Keep a row of one arm in one round: its cycles from the prompts on. Without a chance, it decodes plainly."""
    run, how, chances = arms[0 if chance is None else drafts]
    if chance is not None:
        chances.fill_(chance)
    batch, cycles = about["batch"], 6 if context.dry else CYCLES
    run.restart(batch, first_seed=1000 * number)
    before = int(run.engine.slots.count.sum())
    seconds = run.cycles(cycles)
    tokens = (int(run.engine.slots.count.sum()) - before) / (batch * cycles)
    planted = {} if chance is None else {"label": LABEL, "accepted": tokens - 1, "planted": expected(chance, drafts)}
    context.keep(
        "cycle", 1e3 * statistics.median(seconds), unit="ms", round=number, beside=drafts,
        K=0 if chance is None else drafts, chance=chance, cycles=cycles, how=how, **planted, **about,
    )  # fmt: skip


def _pair(context: Context) -> None:
    """Keep the seconds of an update and of a rollout of as many tokens, plain and at planted acceptance."""
    memory = torch.cuda.get_device_properties(0).total_memory if context.device.type == "cuda" else 0
    shapes = {"dense 7B": DENSE_7B, "Qwen3-1.7B": SHAPES["Qwen3-1.7B"]}
    tokens, batch = (64, 2) if context.dry else (PAIR_TOKENS, PAIR_BATCH)
    fits = {n: s for n, s in shapes.items() if 1.1 * sum(question(s, tokens, True).parts().values()) < memory}
    name, shape = ("tiny", TINY) if context.dry or not fits else next(iter(fits.items()))
    context.keep("pair of", None, model=name, tokens=tokens, batch=batch)
    with context.tried("update", model=name):
        if context.left < 0:
            raise TimeoutError("time is up")
        if not _cycles(context.rows, model=name, batch=batch):
            policy = policy_of(shape, context.device)
            _grid(context, policy, name, batch, (PAPER_DRAFTS,), CHANCES)
            del policy
            _free(context)
        spent = update(shape, context.device, tokens, checkpointing=True)
        context.keep("update", spent["s"], unit="s", model=name, tokens=tokens, batch=batch, memory=spent["peak GB"])


# ---- the formulas


def synchronous(share: float, rollouts: float) -> float:
    """Return the speed-up of a step if its rollouts, ``share`` of it, are ``rollouts`` times as fast."""
    return 1 / (1 - share + share / rollouts)


def asynchronous(share: float, rollouts: float) -> float:
    """Return the speed-up if rollouts and updates run in parallel on separate machines: the longer one counts.

    ``share``: rollouts over rollouts plus updates, on those machines.
    """
    return max(share, 1 - share) / max(share / rollouts, 1 - share)


def needed_share(steps: float, rollouts: float) -> float:
    """Return the share of rollouts that makes a synchronous step ``steps`` times as fast: .57 for 1.5 at 2.4."""
    return (1 - 1 / steps) / (1 - 1 / rollouts)


# ---- what the rows say


def ratios(rows: Sequence[Row], model: str, batch: int, drafts: int, chance: float) -> Interval | None:
    """Return the speed relative to plain decoding, over the rounds with both arms; None if fewer than two have both."""
    found = []
    for number in sorted({row["round"] for row in rows if row["what"] == "cycle" and row["value"]}):
        same = {"model": model, "batch": batch, "round": number, "beside": drafts}
        plain = [row["value"] for row in _cycles(rows, chance=None, **same)]
        drafted = [row for row in _cycles(rows, chance=chance, **same)]
        if plain and drafted:
            length = 1 + statistics.fmean(row["planted"] for row in drafted)
            found.append(length * statistics.fmean(plain) / statistics.fmean(row["value"] for row in drafted))
    return across_seeds(found) if len(found) > 1 else None


def _cycles(rows: Sequence[Row], **about: object) -> list[Row]:
    timed = [row for row in rows if row["what"] == "cycle" and row["value"]]
    return [row for row in timed if all(row[name] == value for name, value in about.items())]


def cells(rows: Sequence[Row]) -> list[tuple[str, int, int, float]]:
    """Return model, batch, K and chance of all arms with drafts, in their order."""
    keys = [(row["model"], row["batch"], row["K"], row["chance"]) for row in _cycles(rows) if row["K"]]
    return sorted(set(keys))


def deviation(rows: Sequence[Row]) -> float:
    """Return the largest deviation of any arm's accept length from the planted one, in standard errors."""
    found = []
    for model, batch, drafts, chance in cells(rows):
        visits = _cycles(rows, model=model, batch=batch, K=drafts, chance=chance)
        error = (variance(chance, drafts) / (batch * sum(row["cycles"] for row in visits))) ** 0.5
        mean = statistics.fmean(row["accepted"] for row in visits)
        found.append(abs(mean - expected(chance, drafts)) / max(error, 1e-12))
    return max(found, default=0.0)


def verdict(interval: Interval) -> str:
    """Return the verdict of the rule at the head of this file on an interval of ratios."""
    if interval.low > ROLLOUTS:
        return "reached"
    return "missed" if interval.high < ROLLOUTS else "open"


def page(rows: list[Row]) -> list[str]:
    """Return the lines of the page of a GPU run: the curve, the rule's verdicts, and the pair with both formulas."""
    lines = [f"**{LABEL.capitalize()}.** Speeds of a random model; the accept length is that of a table.", ""]
    away = deviation(rows)
    failed = "" if away < 4 else " **The planting failed: no number below counts.**"
    lines += [f"- Accept lengths lie at most {away:.1f} standard errors from the planted ones.{failed}"]
    lines += [
        f"- Rollouts are up to {ROLLOUTS} times as fast in the paper. That the mean or the best task reaches it is"
    ]
    lines[-1] += " our bar; the rule is at the head of benchmarks/gpu/headline.py."
    lines += [""]
    lines += ["| model | B | K | chance | accept length | x plain | |", "|---|---|---|---|---|---|---|"]
    judged = {chance_of(percent): name for name, percent in JUDGED.items()}
    for model, batch, drafts, chance in cells(rows):
        found, length = ratios(rows, model, batch, drafts, chance), 1 + expected(chance, drafts)
        told = ""
        if drafts == PAPER_DRAFTS and chance in judged and found is not None:
            told = f"{judged[chance]}: {ROLLOUTS} times is {verdict(found)}"
        lines.append(f"| {model} | {batch} | {drafts} | {chance:.3f} | {length:.2f} | {found or 'unknown'} | {told} |")
    return [*lines, "", *_marks(rows), *_pair_lines(rows)]


def _marks(rows: list[Row]) -> list[str]:
    """Return the speed relative to plain decoding at each acceptance of the paper's Table 2, interpolated."""
    lines = ["| model | B | Table 2 | " + " | ".join(TABLE_2["cross-entropy"]) + " |", "|---|---|---|" + "---|" * 5]
    for model, batch in sorted({(row["model"], row["batch"]) for row in _cycles(rows)}):
        curve = _curve(rows, model, batch, PAPER_DRAFTS)
        for head, tasks in TABLE_2.items():
            found = [_between(curve, chance_of(percent)) for percent in tasks.values()]
            lines.append(f"| {model} | {batch} | {head} | {' | '.join(found)} |")
    return [*lines, ""]


def _curve(rows: Sequence[Row], model: str, batch: int, drafts: int) -> list[tuple[float, Interval]]:
    """Return chances with their ratios, lowest first."""
    keys = [key for key in cells(rows) if key[:3] == (model, batch, drafts)]
    return [(key[3], found) for key in keys if (found := ratios(rows, *key)) is not None]


def _between(curve: Sequence[tuple[float, Interval]], chance: float) -> str:
    """Return the ratio at a chance, interpolated linearly; unknown outside of the measured chances."""
    for (left, low), (right, high) in itertools.pairwise(curve):
        if left <= chance <= right:
            return f"{low.value + (high.value - low.value) * (chance - left) / (right - left):.2f}"
    return "unknown"


def _pair_lines(rows: list[Row]) -> list[str]:
    """Return the results of the pair by both formulas, and the shares that the paper's numbers need."""
    need = ", ".join(f"{steps} times needs {needed_share(steps, ROLLOUTS):.2f}" for steps in (1.5, STEPS))
    lines = [f"- With rollouts {ROLLOUTS} times as fast, of a synchronous step: {need} of it to be rollouts."]
    for row in rows:
        if row["what"] != "update" or not row["value"]:
            continue
        same = {"model": row["model"], "batch": row["batch"]}
        for percent in JUDGED.values():
            found = ratios(rows, drafts=PAPER_DRAFTS, chance=chance_of(percent), **same)
            plain = [one["value"] for one in _cycles(rows, chance=None, **same)]
            if found is None or not plain:
                continue
            rollout = statistics.fmean(plain) * row["tokens"] / row["batch"] / 1e3
            share = rollout / (rollout + row["value"])
            lines.append(
                f"- {row['model']}, {row['tokens']} tokens: rollout {rollout:.3g} s at B = {row['batch']}, update "
                f"{row['value']:.3g} s, so that rollouts are {share:.2f} of both. With {percent:.0f} % of drafts "
                f"planted as accepted they are {found.value:.2f} times as fast, a synchronous step "
                f"{synchronous(share, found.value):.2f} times, an asynchronous one "
                f"{asynchronous(share, found.value):.2f} times; computed, not run."
            )
    return lines


# ---- the figure


def draw(rows: list[Row], path: Path) -> None:
    """Draw the speed relative to plain decoding by planted chance, a panel per batch; mark the paper's acceptances."""
    from recipes.reproduce.figures import figure  # matplotlib, which a machine with a lent GPU may lack

    panels = sorted({key[:2] for key in cells(rows)})
    with figure(path, len(panels), 4.2, 3.4, squeeze=False, sharey=True) as axes:
        for at, (model, batch) in zip(axes[0], panels, strict=True):
            for drafts in sorted({key[2] for key in cells(rows) if key[:2] == (model, batch)}):
                curve = _curve(rows, model, batch, drafts)
                values = [one.value for _, one in curve]
                reach = [[one.value - one.low for _, one in curve], [one.high - one.value for _, one in curve]]
                at.errorbar([x for x, _ in curve], values, reach, marker="o", ms=4, capsize=3, label=f"K = {drafts}")
            for level, text in ((1.0, "plain"), (ROLLOUTS, "rollouts in the paper, at most")):
                at.axhline(level, color="#6b7280", linestyle="--", linewidth=1)
                at.annotate(text, (0.5, level), (0, 2), textcoords="offset points", fontsize=7)
            _rugs(at)
            at.set(title=f"{model}, batch {batch}", xlabel="planted chance of a draft", ylim=(0, None))
        axes[0][0].set_ylabel("times plain decoding")
        axes[0][0].legend(fontsize=8, loc="lower right")
        axes[0][0].figure.suptitle(LABEL.capitalize(), fontsize=10)


def _rugs(axes: Any) -> None:
    """Mark the acceptances of the paper's tables at K = 3, with one line of ticks per head."""
    tables = {f"Table 2, {head}": tuple(tasks.values()) for head, tasks in TABLE_2.items()}
    tables |= {f"Table 3, {name}": percents for name, percents in TABLE_3.items()}
    for place, (name, percents) in enumerate(tables.items()):
        height = 0.03 + 0.035 * place
        shade = "#d1603d" if "cross" in name or "3.6" in name else "#16407a"
        chances = [chance_of(percent) for percent in percents]
        axes.plot(chances, [height] * len(chances), "|", ms=7, color=shade, transform=axes.get_xaxis_transform())
        axes.annotate(name, (0.51, height), xycoords=axes.get_xaxis_transform(), fontsize=5, va="center", color=shade)


def main(arguments: list[str]) -> None:
    """Draw the figure of stored rows, ``FILE.svg`` beside ``FILE.json``.

    Raises:
        UserError: There is no such file, or it has no cycle with drafts.
    """
    path = Path(arguments[0]) if len(arguments) == 1 else Path()
    if not path.is_file():
        raise UserError(
            f"{' '.join(arguments) or 'nothing'} is not a file: give one file of this stage, such as 9_headline.json"
        )
    rows = json.loads(path.read_text()).get("rows", [])
    if not cells(rows):
        raise UserError(f"{path} has no cycle with drafts: give the file that --stage headline wrote")
    draw(rows, path.with_suffix(".svg"))
    sys.stdout.write(f"{path.with_suffix('.svg')} written\n")


if __name__ == "__main__":
    run_main(main)
