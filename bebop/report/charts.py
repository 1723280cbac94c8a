"""What the report shows: which metrics make up a chart, and the words that explain it.

A chart is data; ``figures`` draws it. Adding one means adding an entry here.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from bebop.catalogue import METRICS
from bebop.report.runs import Run
from bebop.trajectory import DRAFT_STATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity: a solid line and, where there is a second estimate of the same thing, a dashed one."""

    label: str
    metric: str
    dashed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A figure with its text. With several runs each series gets a panel of its own, so that colours mean runs."""

    title: str
    text: str
    unit: str
    series: tuple[Series, ...]
    styles: tuple[str, str] | None = None  # what solid and dashed (or strong and faint) mean
    split: bool = False  # a panel for each series even with one run: their units differ
    smooth: bool = False  # faint line as recorded, strong line its running mean
    stacked: int = 0  # this many series, the first ones, are parts of a whole: bars; the rest are lines over them
    zero: bool = True  # the y axis includes 0
    bar: tuple[float, str] | None = None  # a height at which something is decided, and what: a dashed line


def charts(runs: Sequence[Run]) -> list[Chart]:
    """All charts, in the order of the page; the number of draft positions comes from the runs."""
    own = _counted(runs) + [EXTRA] * any(EXTRA.series[0].metric in run.columns for run in runs)
    own += [CERTIFICATE] * any(run.has(CERTIFICATE.series[0].metric) for run in runs)
    return [REWARD, RESPONSE, ENTROPY, ACCEPT_LENGTH, _acceptance(runs), *own, STALENESS, TIME, THROUGHPUT, TRAIN]


def metrics(chart: Chart) -> list[str]:
    """Every metric that a chart wants."""
    return [metric for series in chart.series for metric in (series.metric, series.dashed) if metric]


WINDOW = 10  # steps in the running mean

REWARD = Chart(
    title="Reward",
    text="Mean reward of the answers that each update was trained on. The faint line is each step as recorded; the "
    f"strong line is the mean of the last {WINDOW} steps (fewer at the start). A rise of the strong line is "
    "learning; single steps swing with the difficulty of their prompts.",
    unit="reward per answer",
    series=(Series(label="reward", metric="reward/mean"),),
    styles=(f"mean of the last {WINDOW} steps", "each step"),
    smooth=True,
)
RESPONSE = Chart(
    title="Response length",
    text="Mean number of tokens in an answer, stop token included. Read it next to the reward: a reward that rises "
    "while the length collapses often means that the reasoning is being skipped, and a length that runs into the "
    "limit means cut-off answers.",
    unit="tokens per answer",
    series=(Series(label="length", metric="response/length"),),
)
ENTROPY = Chart(
    title="Entropy",
    text="Uncertainty about the next token. Policy: over all tokens of the update, from the trainer. Draft and target: "
    "at the positions where a draft was tested, from the rollout. Policy entropy near 0 means that exploration "
    "has ended. A growing distance between draft and target means that the draft head no longer follows the "
    "policy, and acceptance will fall.",
    unit="nats per token",
    series=(
        Series(label="policy", metric="policy/entropy"),
        Series(label="draft", metric="draft/entropy"),
        Series(label="target", metric="rollout/target_entropy"),
    ),
)
ACCEPT_LENGTH = Chart(
    title="Accept length",
    text="Tokens gained by one verification pass: accepted drafts plus the one token that the pass always yields. 1 is "
    "plain decoding; K + 1 is the most that K drafts allow. This is the upper bound of the speed-up; drafting and "
    "the wider verification take their share of it.",
    unit="tokens per pass",
    series=(Series(label="accept length", metric="rollout/accept_length"),),
    zero=False,
)
EXTRA = Chart(
    title="Extra positions",
    text="Positions that the drafter adds to a pass of the model, beside the newest token and its drafts. Each goes "
    "through some of the layers and makes a pass dearer; the drafts that come of them cost no pass of their own.",
    unit="positions per pass",
    series=(Series(label="extra positions", metric="rollout/extra_positions"),),
)
CERTIFICATE = Chart(
    title="Certificate of the answers",
    text="Evidence that answers do not follow the distributions that the trainer computes under the weights that wrote "
    "them. As long as they do, it stays around or below 0, and in one run of 10,000 it ever reaches 9.2; from there on "
    "the engine is at fault, and the controller's log says what for. It begins again after weights were sent again and "
    "after a change of the decoding system.",
    unit="nats",
    series=(Series(label="ln E", metric="certify/log_e"),),
    bar=(math.log(10_000), "9.2: the engine is at fault"),  # ln 1/ALPHA of bebop.trainer.certify
)
STALENESS = Chart(
    title="Staleness",
    text="Updates between the weights that produced a token and the weights that are trained on it: mean and largest "
    "over the tokens of a step. 0 is on-policy. The largest must stay within the configured bound.",
    unit="updates",
    series=(Series(label="mean", metric="staleness/mean"), Series(label="max", metric="staleness/max")),
)
TIME = Chart(
    title="Where the time goes",
    text="The bars are the trainer's step: updating the weights, handing them to the rollout (sync), waiting for "
    "answers (idle) and asking why acceptance moves (monitor); together they make up the whole step, the black line. "
    "Rollout is how long the workers were generating in that time, on average over workers: close to the black line "
    "means that they were always busy; the distance between the two is time that they waited. Synchronous runs have "
    "idle bars as high as the rollout line; asynchronous runs shrink them.",
    unit="seconds per step",
    series=(
        Series(label="update", metric="time/update"),
        Series(label="sync", metric="time/sync"),
        Series(label="idle", metric="time/idle"),
        Series(label="monitor", metric="time/monitor"),
        Series(label="rollout", metric="time/rollout"),
        Series(label="step", metric="time/step"),
    ),
    stacked=4,
)
THROUGHPUT = Chart(
    title="Rollout speed",
    text="Tokens generated per second by all rollout workers together. It moves with the accept length, with the "
    "number of answers decoded side by side (it falls while the last long ones finish) and with what else runs on "
    "the machine. Tokens count in the step in which their group came in: a step that trains on groups which were "
    f"there already has none. The strong line is the mean of the last {WINDOW} steps.",
    unit="tokens per second",
    series=(Series(label="tokens/s", metric="rollout/tokens_per_s"),),
    styles=(f"mean of the last {WINDOW} steps", "each step"),
    smooth=True,
)
TRAIN = Chart(
    title="Update",
    text="Loss: its level says little in policy gradients; look for jumps. Gradient norm: before clipping; spikes "
    "announce instability. Mean ratio: new over old probability of the sampled tokens; it should stay close to 1. "
    "Clipped share: tokens whose ratio left the trust region; above roughly 0.2 the steps are too large. Sample size "
    "of weights, with inexact decoding: how many equally weighted tokens the weighted ones are worth, as a share.",
    unit="",
    series=(
        Series(label="loss", metric="train/loss"),
        Series(label="gradient norm", metric="train/grad_norm"),
        Series(label="mean ratio", metric="train/ratio_mean"),
        Series(label="clipped share of tokens", metric="train/clip_frac"),
        Series(label="sample size of weights", metric="train/tis_ess"),
    ),
    split=True,
    zero=False,
)


def _acceptance(runs: Sequence[Run]) -> Chart:
    """Acceptance per draft position, for as many positions as any run has."""
    matches = (re.fullmatch(r"rollout/accept_rate/(\d+)", name) for run in runs for name in run.columns)
    positions = max((int(match[1]) for match in matches if match), default=1)
    return Chart(
        title="Acceptance per draft position",
        text="Share of drafts accepted at each position, among those whose predecessors were all accepted. Solid: "
        "counted. Dashed: the overlap of draft and target distribution at the same positions, which estimates the same "
        "rate with less noise. With an exact rule the two agree up to chance, and lines that stay apart point to a "
        "fault in the verification; a rule that keeps drafts which failed accepts more than the overlap.",
        unit="accepted / reached",
        series=tuple(
            Series(label=f"draft {k}", metric=f"rollout/accept_rate/{k}", dashed=f"rollout/overlap/{k}")
            for k in range(1, positions + 1)
        ),
        styles=("counted", "overlap"),
        zero=False,
    )


def _counted(runs: Sequence[Run]) -> list[Chart]:
    """What the decoding system counts of its own, a chart for each name; none for most systems."""
    found: dict[str, set[int]] = {}
    for match in (re.fullmatch(r"rollout/(\w+)/(\d+)", name) for run in runs for name in run.columns):
        if match and match[1] not in ("accept_rate", *DRAFT_STATS):
            found.setdefault(match[1], set()).add(int(match[2]))
    meanings = {row.name: row.meaning.replace("`", "") for row in METRICS}
    return [
        Chart(
            title=name.replace("_", " ").capitalize(),
            text=meanings.get(f"rollout/{name}/K", "What the decoding system counts at each draft position") + ".",
            unit="per draft that was reached",
            series=tuple(Series(label=f"draft {k}", metric=f"rollout/{name}/{k}") for k in sorted(positions)),
        )
        for name, positions in found.items()
    ]
