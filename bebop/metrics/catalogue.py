"""Registry of metrics: name, meaning and unit of each, and where it is drawn.

A new metric is one row of ``METRICS`` and the function that computes it. Every other page reads the rows:

- ``python -m bebop.metrics.catalogue`` writes docs/metrics.md;
- the report draws the rows with a ``chart``, Grafana those with a ``panel``; both are titles in ``CHARTS``;
- the progress line prints the rows with ``progress``, the viewer's first page those with a ``curve``;
- TensorBoard, W&B and Trackio show those with ``main`` first (``tracker_values``).

In a name K stands for a draft position, from 1 on, and N for the first turn of a kind: 0, 1, 2 (2 and 3), 4 (4 to 7),
8, ... A metric without data is absent from a step: plain decoding has no acceptance rate.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from bebop.command import run_main
from bebop.errors import UserError

Part = Literal["run", "evaluation", "turn", "head", "drift", "certificate", "system", "adapt"]
TITLES: dict[Part, str] = {
    "run": "Every run (`metrics.jsonl`)",
    "evaluation": "Held-out evaluation (`evaluation.every`), at the steps that are evaluated; step 0 has these alone",
    "turn": "Trajectories of several turns (`task.source=environment`)",
    "head": "The head, in adaptations and where it is trained beside the policy",
    "drift": "The monitor (`monitor.drift=true`), from the sixth step on",
    "certificate": "The certificate (`monitor.certify_every`), at the steps that read it; exact systems alone",
    "system": "What one decoding system counts of its own; by position, over the cycles that reached it",
    "adapt": "Adaptations, on held-out text at `train.eval_every` steps",
}
# What a run needs for the metrics of a part, if not every run has them.
NEEDS: dict[Part, str] = {
    "evaluation": "held-out evaluation (evaluation.every)",
    "head": "co-training of the head",
    "drift": "the monitor's decomposition",
    "certificate": "the certificate (monitor.certify_every) and an exact decoding system",
}
INEXACT = "completions of an inexact system that says what it drew from"
KEPT = "rollout.on_update=keep"
EXPERTS = "a mixture of experts"
REPLAY = "trainer.routing_replay"
WINDOW = 10  # steps in the running mean of a smoothed chart


@dataclass(frozen=True, slots=True)
class Chart:
    """Figure of the report, panel of Grafana, or both; the rows of ``METRICS`` determine its contents.

    On the page of one run colours mean metrics. With several runs they mean runs, and each metric has its own plot.
    """

    title: str
    group: Literal["drafting", "learning", "running"]  # row of Grafana's dashboard
    text: str  # how to read it
    unit: str = ""  # as a caption on the page; Grafana takes the unit of the rows
    optional: bool = False  # the page leaves it out without a note where nothing was recorded
    styles: tuple[str, str] | None = None  # what solid and dashed (or strong and faint) mean
    split: bool = False  # a plot for each metric even with one run: their units differ
    smooth: bool = False  # faint line as recorded, strong line its running mean
    stacked: int = 0  # this many metrics, the first ones, are parts of a whole: bars; the rest are lines over them
    zero: bool = True  # the y axis includes 0
    bar: tuple[float, str] | None = None  # a decision threshold and its label: a dashed line
    states: bool = False  # values 0, 1, ... are states of the monitor: a timeline in Grafana


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric, or one for each draft position (K).

    >>> MetricRow("time/step", "duration of the step", "s", chart="Where the time goes", label="step")  # doctest: +SKIP
    """

    name: str
    meaning: str
    unit: str = ""
    part: Part = "run"
    interval: bool = False  # with name_low and name_high, its 95 % interval
    rare: str = ""  # what it takes, where its part alone does not bring it
    label: str = ""  # in the legend of its charts; a draft position is added to it
    chart: str = ""  # title of the chart that shows it in the report
    panel: str = ""  # title of the chart that shows it in Grafana
    dashed: bool = False  # in the report: a second estimate of the metric before it, drawn beside that
    progress: str = ""  # format in the progress line, short enough for 80 columns
    curve: str = ""  # its name on the viewer's first page
    main: str = ""  # its name in the first group of TensorBoard and other trackers, which sort by name


def _rows(part: Part, *rows: MetricRow) -> tuple[MetricRow, ...]:
    return tuple(replace(row, part=part) for row in rows)


def _change(name: str, of: str, unit: str, panel: str = "", rare: str = "") -> tuple[MetricRow, ...]:
    """Return the rows of a change against the first steps, and of its parts."""
    entropy = "the part of it that the change of the target's entropy explains"
    mismatch = "the rest of it: the head does not fit the policy any more"
    rows = (
        MetricRow(f"{name}/change", f"change of {of} against the first five steps", unit, label="change", panel=panel),
        MetricRow(f"{name}/entropy", entropy, unit, label="entropy part", panel=panel),
        MetricRow(f"{name}/mismatch", mismatch, unit, label="mismatch part", panel=panel),
        MetricRow(f"{name}/entropy_change", "change of the target's entropy meanwhile", "nats"),
    )
    return tuple(replace(row, interval=True, rare=rare) for row in rows)


REWARD = _rows(
    "run",
    MetricRow("step", "finished updates", "updates", panel="Progress", label="step"),
    MetricRow("version", "version of the weights, which is the same number", "updates"),
    MetricRow("reward/mean", "mean reward of the completions trained on", "reward",
        label="reward", chart="Reward", panel="Reward", progress="reward {:.3f}", curve="reward", main="1_reward"),
    MetricRow("reward/std", "spread within a group (population), mean over groups", "reward",
        label="spread in a group", panel="Reward"),
    MetricRow("reward/solve_none", "share of groups in which no completion has a reward of at least 1", "share",
        label="none solved", panel="Groups without a signal"),
    MetricRow("reward/solve_all", "share of groups in which every completion has a reward of at least 1", "share",
        label="all solved", panel="Groups without a signal"),
    MetricRow("reward/timeouts", "completions whose reward function hung, and whose reward of 0 means nothing",
        "completions"),
    MetricRow("reward/PART",
        "mean of a part, over the completions that have it: a function of a list, or a key of what a function returned",
        "reward", rare="a reward of several parts"),
    MetricRow("reward/PART/std", "spread of a part within a group (population), mean over groups", "reward",
        rare="a reward of several parts"),
    MetricRow("response/length", "mean length of a completion, stop token included", "tokens",
        label="mean", chart="Response length", panel="Response length", progress="len {:.0f}", main="2_length"),
    MetricRow("response/length_max", "largest length of a completion", "tokens",
        label="largest", panel="Response length"),
    MetricRow("response/truncated", "share of completions cut off by `max_new_tokens`", "share",
        label="cut off", panel="Completions cut off"),
    MetricRow("response/tokens", "completion tokens in the batch", "tokens"),
)  # fmt: skip
ROLLOUT = _rows(
    "run",
    MetricRow("rollout/accept_length",
        "tokens emitted per cycle: accepted drafts + 1, less what the end of a completion cuts off", "tokens",
        label="accept length", chart="Accept length", panel="Accept length", progress="accept {:.2f}",
        curve="accept length", main="4_accept_length"),
    MetricRow("rollout/accept_rate/K", "share of accepted drafts at position K, among cycles that reached it", "share",
        label="draft", chart="Acceptance per draft position", panel="Acceptance per draft position"),
    MetricRow("rollout/overlap/K",
        "mean Σ min(p, q) at position K: under rejection sampling the same rate, with less noise", "share",
        label="sampled", chart="Acceptance per draft position", dashed=True, panel="Sampled against greedy drafts"),
    MetricRow("rollout/target_only/K",
        "mean p(argmax q) at position K: what greedy drafts would have been accepted with", "share",
        label="greedy", panel="Sampled against greedy drafts"),
    MetricRow("policy/entropy", "entropy of the distribution trained on, mean over completion tokens", "nats",
        label="policy", chart="Entropy", panel="Entropy", curve="entropy of the policy", main="3_entropy"),
    MetricRow("draft/entropy", "entropy of the draft's distribution at verified draft positions", "nats",
        label="draft", chart="Entropy", panel="Entropy"),
    MetricRow("rollout/target_entropy", "entropy of the model's distribution at verified draft positions", "nats",
        label="target", chart="Entropy", panel="Entropy", curve="entropy of the target at drafts"),
    MetricRow("rollout/forwards_per_token",
        "backbone passes that a completion took part in, prefill left out, over its tokens", "passes"),
    MetricRow("rollout/tokens_per_s", "completion tokens of the groups that came in, over the duration of the step",
        "tokens/s", label="tokens/s", chart="Rollout speed", panel="Rollout speed", progress="{:.0f} tok/s",
        main="5_tokens_per_s"),
    MetricRow("rollout/logprob_diff",
        "mean distance of the trainer's log p from the engine's, all tokens: staleness included", "nats",
        label="log-probs", panel="Trainer against engine"),
    MetricRow("rollout/logprob_diff_current",
        "mean distance of the trainer's log p *under the weights that produced the token* from the engine's, over "
        "tokens whose whole context those weights computed: rounding, or a bug", "nats"),
    MetricRow("rollout/logprob_diff_kept",
        "the same over tokens that saw keys and values of older weights: what keeping them does", "nats", rare=KEPT),
    MetricRow("rollout/restarts", "rollout workers replaced so far", "workers",
        label="workers replaced", panel="Restarts and skipped steps"),
    MetricRow("rollout/filtered_groups",
        "groups passed over for the step's batch, since all rewards in them were equal", "groups",
        rare="algorithm.dynamic_sampling"),
    MetricRow("staleness/mean", "mean updates between a token's weights and those it trains", "updates",
        label="mean", chart="Staleness", panel="Staleness"),
    MetricRow("staleness/max", "largest number of them", "updates",
        label="max", chart="Staleness", panel="Staleness", progress="stale {:.0f}"),
)  # fmt: skip
TRAINING = _rows(
    "run",
    MetricRow("train/loss", "policy loss", label="loss", chart="Update"),
    MetricRow("train/grad_norm", "norm of the gradient before clipping",
        label="gradient norm", chart="Update", panel="Gradient norm of the policy"),
    MetricRow("train/lr", "learning rate"),
    MetricRow("train/skipped", "optimizer steps skipped because the gradient was not finite", "steps",
        label="steps skipped", panel="Restarts and skipped steps"),
    MetricRow("train/ratio_mean", "trainer's over engine's probability of a token, at the start of the update",
        "1 if on-policy", label="mean ratio", chart="Update", panel="Trainer against engine"),
    MetricRow("train/ratio_error_max",
        "largest distance of the ratio from 1 on the tokens of `rollout/logprob_diff_current`",
        label="largest distance from 1", panel="Trainer against engine"),
    MetricRow("train/ratio_error_kept", "the same on those of `rollout/logprob_diff_kept`", rare=KEPT),
    MetricRow("train/ratio_tokens",
        "tokens in `train/ratio_error_max`: all of the weights in force, and those of `monitor.check_completions` "
        "completions that older weights produced", "tokens"),
    MetricRow("train/clip_frac", "share of tokens whose objective is clipped", "share",
        label="clipped share of tokens", chart="Update"),
    MetricRow("train/tis_mean", "mean weight of truncated importance sampling"),
    MetricRow("train/tis_ess", "effective sample size of these weights over the tokens: 1 if they are equal", "share",
        rare=INEXACT, label="sample size of weights", chart="Update"),
    MetricRow("train/tis_capped", "share of tokens whose weight `algorithm.tis_cap` cuts", "share", rare=INEXACT),
    MetricRow("train/tis_ess_answers",
        "effective sample size of the weights of whole completions, without the cap, over the completions", "share",
        rare=INEXACT),
    MetricRow("train/kl", "KL to the initial policy", "nats", rare="algorithm.kl_coefficient above 0"),
    MetricRow("train/expert_load_max",
        "largest share of a layer's choices that one of its E experts has, over all tokens of the update; 1 / E where "
        "all have as many", "share", rare=EXPERTS),
    MetricRow("train/router_aux_loss", "load balancing loss of the routers, without its weight",
        rare="trainer.router_aux_loss above 0"),
    MetricRow("train/routing_recorded", "share of tokens whose experts the engine recorded, over all routers", "share",
        rare=REPLAY),
    MetricRow("train/routing_agreement",
        "share of recorded choices that the trainer's own routers make as well: what replay changes is the rest",
        "share", rare=REPLAY),
    MetricRow("samples/trained", "completions trained on so far, lost ones counted", "completions"),
    MetricRow("samples/prompts", "prompts trained on so far", "prompts"),
    MetricRow("samples/epoch", "epoch of the newest question of the batch: how often all questions were asked before",
        "epochs", rare="task.size, or a file of questions"),
)  # fmt: skip
TIME = tuple(
    MetricRow(f"time/{name}", meaning, "s", part="evaluation" if name == "eval" else "run", label=label,
        chart="Where the time goes" if drawn else "", panel="" if name == "eval" else "Where the time goes")
    for name, meaning, label, drawn in (
        ("update", "the update", "update", True),
        ("sync", "publishing weights (to the last worker in a synchronous job), plus a worker's mean time to take them "
         "in", "sync", True),
        ("idle", "part of the step in which the trainer waited for completions", "idle", True),
        ("monitor", "reading the probe set and asking the monitor", "monitor", True),
        ("eval", "part of the step in which the trainer waited for an evaluation", "evaluation", True),
        ("save", "writing the checkpoint of the step before", "checkpoint", True),
        ("rollout", "decoding, mean over workers", "rollout", True),
        ("step", "duration of the step", "step", True),
        ("rollout_idle", "neither decoding nor taking in weights, mean over workers", "workers wait", False),
    )
)  # fmt: skip

ENDED = {
    "done": "their environment ended",
    "length": "end with a completion that was cut off by `max_new_tokens`",
    "turns": "spent `task.environment.max_turns`",
    "tokens": "spent `rollout.max_length`",
    "seconds": "spent `task.environment.max_seconds`",
}
EVALUATION = _rows(
    "evaluation",
    MetricRow("eval/greedy_pass_at_1", "share of held-out questions whose greedy completion passes: its reward is at "
        "least `evaluation.threshold`", "share", label="greedy, pass@1", chart="Held-out questions",
        panel="Held-out questions", rare="evaluation.greedy"),
    MetricRow("eval/pass_at_1", "share of sampled completions that pass, mean over questions", "share",
        label="sampled, pass@1", chart="Held-out questions", panel="Held-out questions", curve="held-out pass@1",
        rare="evaluation.samples above 0", main="6_held_out_pass_at_1"),
    MetricRow("eval/pass_at_k", "pass@k of sampled completions, k = `evaluation.k`: unbiased estimate of the "
        "probability that one of k passes, mean over questions", "share", label="sampled, pass@k",
        chart="Held-out questions", panel="Held-out questions", rare="evaluation.samples above 0"),
    MetricRow("eval/greedy_reward", "mean reward of greedy completions", "reward", rare="evaluation.greedy"),
    MetricRow("eval/reward", "mean reward of sampled completions", "reward", rare="evaluation.samples above 0"),
    MetricRow("eval/length", "mean length of all completions of the evaluation, stop token included", "tokens"),
    MetricRow("eval/truncated", "share of these completions cut off by their length", "share"),
    MetricRow("eval/lost", "trajectories given up, as their environments were lost too often", "trajectories",
        rare="task.source=environment"),
    MetricRow("eval/seen", "held-out questions that training has asked so far; 0 unless there are few different ones "
        "or a file repeats them", "questions"),
    MetricRow("eval/best_step", "step of the best evaluation so far, by `evaluation.best_by`", "updates"),
)  # fmt: skip
TURNS = _rows(
    "turn",
    MetricRow("turn/count", "mean number of turns of a trajectory", "turns"),
    MetricRow("turn/count_p50", "half of the trajectories have as many turns or fewer", "turns",
        label="median", chart="Turns of a trajectory"),
    MetricRow("turn/count_p99", "99 % of them have", "turns", label="99 %", chart="Turns of a trajectory"),
    MetricRow("turn/seconds_p50", "half of the trajectories spent as long in their environments or less", "s",
        label="seconds, median", chart="Environments"),
    MetricRow("turn/seconds_p99", "99 % of them did", "s", label="seconds, 99 %", chart="Environments"),
    MetricRow("turn/restarts", "times that one of them began again, as its environment was lost", "times",
        label="began again", chart="Environments"),
    MetricRow("turn/lost", "trajectories given up, as their environments were lost too often", "trajectories",
        label="lost", chart="Environments"),
    MetricRow("turn/observed", "mean tokens a trajectory that were read and not written", "tokens",
        label="tokens read", chart="Environments"),
    *(
        MetricRow(f"turn/ended/{ending}", f"share of trajectories that {how}", "share",
                  label=ending, chart="How trajectories end")
        for ending, how in ENDED.items()),
    MetricRow("turn/counts/NAME", "mean of what the environment counts under a name of its own", rare="such counts"),
    *(
        MetricRow(f"turn/{name}/{kind}/K", f"{meaning} {which}", "share", rare=rare)
        for name, meaning in (
            ("accept_rate", "share of accepted drafts at position K, among cycles that reached it,"),
            ("overlap", "mean Σ min(p, q) at position K"),
        )
        for kind, which, rare in (
            ("N", "in turns N to 2N - 1 (0: the first; 1: the second)", ""),
            ("after", "in the first cycle after each observation", "an engine that tells it apart"),
        )),
)  # fmt: skip
HEAD = _rows(
    "head",
    MetricRow("head/loss", "loss of the head", label="loss", panel="Head: loss"),
    MetricRow(
        "head/grad_norm", "norm of the head's own gradient before clipping", label="norm", panel="Head: gradient norm"
    ),
    MetricRow("head/lr", "learning rate of the head"),
    MetricRow("head/skipped", "steps of the head skipped because the gradient was not finite", "steps"),
)
DRIFT = _rows(
    "drift",
    MetricRow("drift/state", "0 steady, 1 entropy-driven, 2 mismatch-driven, 3 broken",
        label="state", panel="State of the draft"),
    *_change("drift/length", "the accept length", "tokens", "Why the accept length moved"),
    *_change("drift/position/K", "the acceptance rate at draft position K", "share"),
    *_change(
        "drift/bank", "the acceptance rate of the first draft on the probe set", "share",
        "The same texts, then and now", "a step that reads it"),
    *(
        MetricRow(f"drift/slope/{source}", f"slope of the accept length on entropy: {how}", "tokens/nat", interval=True)
        for source, how in (
            ("early", "early steps"), ("frozen", "between completions"), ("temperature", "over temperatures")
        )),
    MetricRow("drift/boundary", "overlap minus p(argmax q): sampled drafts are better above 0", "share", interval=True,
        label="difference", panel="Sampled minus greedy"),
    MetricRow("drift/length_by_request", "accept length with the same weight for every completion", "tokens"),
    MetricRow("drift/cotraining", "whether the next update trains the head", "0/1"),
)  # fmt: skip
CERTIFICATE = _rows(
    "certificate",
    MetricRow("certify/log_e",
        "evidence that completions do not follow the trainer's distributions, ln E: as long as they do, it ever "
        "reaches ln 10⁴ = 9.2 in one run of 10,000", "nats",
        label="ln E", chart="Certificate of the completions", panel="Certificate of the completions"),
    MetricRow("certify/failed", "whether it ever did since it was last begun", "0/1"),
    MetricRow("certify/tokens", "tokens that it rests on", "tokens"),
    MetricRow("certify/tv_bound",
        "the largest of the bounds on what kinds of faults may still hide, as total variation a token", "share",
        label="largest bound", panel="What the certificate has not seen yet"),
)  # fmt: skip
# The report draws a chart for each name by position that is logged here.
SYSTEM = _rows(
    "system",
    MetricRow("rollout/extra_positions",
        "positions beside the verified ones in a backbone pass, each through some layers, from which later drafts come",
        "positions", label="extra positions", chart="Extra positions"),
    MetricRow("rollout/overridden/K", "`pad`: share of drafts that were accepted although they failed", "share"),
    MetricRow("rollout/bias/K", "`pad`: mean R_N, the distance (total variation) of the emitted distribution from the "
        "target's", "share"),
    MetricRow("rollout/block_size/K", "`blockpilot`, `block_ema`: mean size of the blocks that reached position K, the "
        "newest token included", "tokens"),
    MetricRow("rollout/history/K",
        "`history`, `bebop_history`: mean weight w that history had in what the draft was drawn from", "share"),
    MetricRow("rollout/history_accepted/K",
        "the same, of accepted drafts alone: over rollout/history/K it is how often history's drafts are accepted",
        "share"),
    MetricRow("rollout/head_overlap/K",
        "`bebop_history`: mean Σ min(p, m) over first drafts (K is 1), m being the head's own distribution: the "
        "acceptance of the head by itself, where it is asked", "share"),
    MetricRow("rollout/siblings/K", "`bebop_tree`: mean number of drafts that were tried at depth K", "drafts"),
    MetricRow("rollout/confidence/K", "`pipo`: mean confidence in the drafts of second tokens", "share"),
)  # fmt: skip
ADAPT = _rows(
    "adapt",
    MetricRow("eval/accept_length", "accept length of sampled drafts", "tokens", main="1_accept_length_held_out"),
    MetricRow("eval/accept_length_greedy", "accept length of greedy drafts", "tokens"),
    MetricRow("eval/overlap/K", "mean Σ min(p, q) at position K", "share"),
    MetricRow("eval/draft_entropy", "entropy of the draft's distribution, first draft", "nats"),
)
METRICS = (*REWARD, *EVALUATION, *ROLLOUT, *TRAINING, *TIME, *TURNS, *HEAD, *DRIFT, *CERTIFICATE, *SYSTEM, *ADAPT)

SMOOTHED = (f"mean of the last {WINDOW} steps", "each step")
# In the order of the page, and in Grafana in the order of each group.
CHARTS: tuple[Chart, ...] = (
    Chart("Reward", "learning",
        "Mean reward of the completions that each update was trained on. The faint line is each step as recorded; "
        f"the strong line is the mean of the last {WINDOW} steps (fewer at the start). A rise of the strong line is "
        "learning; single steps swing with the difficulty of their prompts.",
        unit="reward per completion", styles=SMOOTHED, smooth=True),
    Chart("Held-out questions", "learning",
        "Share of held-out questions that are solved: by the greedy completion, by a sampled one (pass@1), and by at "
        "least one of k sampled ones (pass@k). Nothing is trained on them. The standard error of a share p of Q "
        "questions is √(p(1 - p)/Q). Reward that rises while these stand still is learnt by heart.",
        unit="share of questions", optional=True),
    Chart("Groups without a signal", "learning",
        "Share of groups in which no completion, or every completion, is solved."),
    Chart("Response length", "learning",
        "Number of tokens in a completion, stop token included. Read it next to the reward: a reward that rises "
        "while the length collapses often means that the reasoning is being skipped, and a length that runs into the "
        "limit means completions that are cut off.", unit="tokens per completion"),
    Chart("Completions cut off", "learning", "Share of completions that reached the length limit."),
    Chart("Accept length", "drafting",
        "Tokens gained by one verification pass: accepted drafts plus the one token that the pass always yields. "
        "1 is plain decoding; K + 1 is the most that K drafts allow. This is the upper bound of the speed-up; drafting "
        "and the wider verification take their share of it.", unit="tokens per pass", zero=False),
    Chart("Acceptance per draft position", "drafting",
        "Share of drafts accepted at each position, among those whose predecessors were all accepted. The report "
        "draws two lines for it. Solid: counted. Dashed: the overlap of draft and target distribution at the same "
        "positions, which estimates the same rate with less noise. With an exact rule the two agree up to chance, and "
        "lines that stay apart point to a fault in the verification; a rule that keeps drafts which failed accepts "
        "more than the overlap.", unit="accepted / reached", styles=("counted", "overlap"), zero=False),
    Chart("Why the accept length moved", "drafting",
        "Change against the first steps = part that the policy's entropy explains + part that the head not "
        "fitting the policy explains. Bands: 95 %. No parts are drawn while they cannot be told apart."),
    Chart("The same texts, then and now", "drafting",
        "Change of the acceptance rate at the first draft position on contexts of the first step, read again "
        "under the weights of now, so that other completions play no part. Bands: 95 %."),
    Chart("State of the draft", "drafting",
        "What the monitor concludes. broken: drafts are as good as chance, the engine does not run the weights "
        "that it should, or its completions do not follow the policy's distribution.", states=True),
    Chart("Entropy", "drafting",
        "Uncertainty about the next token. Policy: over all tokens of the update, from the trainer. Draft and "
        "target: at the positions where a draft was tested, from the rollout. Policy entropy near 0 means that "
        "exploration has ended. A growing distance between draft and target means that the draft head no longer "
        "follows the policy, and acceptance will fall.", unit="nats per token"),
    Chart("Sampled against greedy drafts", "drafting",
        "The rate at which sampled drafts are accepted, sum of min(p, q), and the rate for the head's most likely "
        "token, p(argmax q). Where the second is larger, decoding=target_only would accept more."),
    Chart("Sampled minus greedy", "drafting",
        "Overlap minus p(argmax q) with its 95 % interval. Below zero, greedy drafts are accepted more."),
    Chart("Extra positions", "running",
        "Positions that the drafter adds to a pass of the model, beside the newest token and its drafts. Each "
        "goes through some of the layers and makes a pass dearer; the drafts that come of them cost no pass of their "
        "own.", unit="positions per pass", optional=True),
    Chart("Gradient norm of the policy", "learning", "Before clipping."),
    Chart("Trainer against engine", "learning",
        "Ratio of the trainer's probability of a token to the engine's. Its largest distance from 1 on tokens of "
        "the weights in force is rounding, or a bug. Beside it the mean distance of their log-probs."),
    Chart("Certificate of the completions", "learning",
        "Evidence that completions do not follow the distributions that the trainer computes under the weights "
        "that wrote them. As long as they do, it stays around or below 0, and in one run of 10,000 it ever reaches "
        "9.2; from there on the engine is at fault, and the controller's log says what for. It begins again after "
        "weights were sent again and after a change of the decoding system.",
        # The bar is ln 1/ALPHA of bebop.trainer.certify.
        unit="nats", optional=True, bar=(math.log(10_000), "9.2: the engine is at fault")),
    Chart("What the certificate has not seen yet", "learning",
        "The largest bound on what kinds of faults may still hide, as total variation a token."),
    Chart("Head: loss", "learning", "Loss of the head that is trained beside the policy."),
    Chart("Head: gradient norm", "learning", "Before clipping; the head has an optimizer and a norm of its own."),
    Chart("Staleness", "running",
        "Updates between the weights that produced a token and the weights that are trained on it: mean and "
        "largest over the tokens of a step. 0 is on-policy. The largest must stay within the configured bound.",
        unit="updates"),
    Chart("Where the time goes", "running",
        "The trainer's step, and within it: updating the weights, handing them to the rollout (sync), waiting for "
        "completions (idle), asking why acceptance moves (monitor), writing the checkpoint of the step before "
        "(checkpoint) and, where held-out questions are evaluated, waiting for those completions (evaluation). The "
        "report stacks these as bars; together they make up the whole step, the black line. Rollout is how long the "
        "workers were generating in that time, on average over workers: close to the step means that they were always "
        "busy; the distance between the two is time that they waited. Synchronous runs have idle bars as high as the "
        "rollout line; asynchronous runs shrink them.", unit="seconds per step", stacked=6),
    Chart("Rollout speed", "running",
        "Tokens generated per second by all rollout workers together. It moves with the accept length, with the "
        "number of completions decoded side by side (it falls while the last long ones finish) and with what else runs "
        "on the machine. Tokens count in the step in which their group came in: a step that trains on groups which "
        f"were there already has none. The strong line is the mean of the last {WINDOW} steps.",
        unit="tokens per second", styles=SMOOTHED, smooth=True),
    Chart("Progress", "running", "Finished updates."),
    Chart("Restarts and skipped steps", "running",
        "Rollout workers replaced so far; optimizer steps of the last update that were skipped because the "
        "gradient was not finite."),
    Chart("Update", "running",
        "Loss: its level says little in policy gradients; look for jumps. Gradient norm: before clipping; spikes "
        "announce instability. Mean ratio: new over old probability of the sampled tokens; it should stay close to 1. "
        "Clipped share: tokens whose ratio left the trust region; above roughly 0.2 the steps are too large. Sample "
        "size of weights, with inexact decoding: how many equally weighted tokens the weighted ones are worth, as a "
        "share.", split=True, zero=False),
    Chart("How trajectories end", "running",
        "; ".join(f"{ending}: {how}" for ending, how in ENDED.items()) + ".",
        unit="share of trajectories", stacked=len(ENDED), optional=True),
    Chart("Turns of a trajectory", "running",
        "Median and 99th percentile over the trajectories of each step. An update waits for the longest.",
        unit="turns", optional=True),
    Chart("Environments", "running",
        "Seconds that a trajectory spends in its environment; trajectories that began again since theirs was lost "
        "(it crashed, or took too long); and those given up, which are in no group: never a reward of 0. Tokens read: "
        "what environments said, on which nothing is trained.", split=True, optional=True),
)  # fmt: skip


def names(*parts: Part, position: str = "1") -> set[str]:
    """Return the names of the parts' metrics, ends of intervals included, with ``position`` for K."""
    numbered = [(row.name.replace("/N/", "/2/").replace("K", position), row) for row in METRICS if row.part in parts]
    return {f"{name}{end}" for name, row in numbered for end in (("", "_low", "_high") if row.interval else ("",))}


# ---- TensorBoard, W&B and Trackio, which draw a chart for each name and sort groups of names by the alphabet

Layout = dict[str, dict[str, tuple[str, list[str]]]]  # group -> title -> kind of a chart, and names in trackers
MAIN_GROUP = "_main"  # sorts before every letter
LAST_GROUPS = {"drift": "z_drift"}  # has most of the names, and would precede head, reward and rollout


def tracker_name(name: str) -> str:
    """Return a metric's name in trackers: its own, except in groups that would precede others."""
    group, slash, rest = name.partition("/")
    return f"{LAST_GROUPS.get(group, group)}{slash}{rest}"


def tracker_values(values: Mapping[str, float]) -> dict[str, float]:
    """Return the values of a step by their names in trackers; those with a ``main`` are also in the first group.

    The version is left out: it is the step, and W&B and Trackio would show names without a group before all others.

    >>> tracker_values({"reward/mean": 0.5, "drift/state": 0.0})
    {'_main/1_reward': 0.5, 'reward/mean': 0.5, 'z_drift/state': 0.0}
    """
    main = {f"{MAIN_GROUP}/{row.main}": values[row.name] for row in METRICS if row.main and row.name in values}
    return main | {tracker_name(name): value for name, value in values.items() if "/" in name}


def tracker_layout(adapted: bool = False) -> Layout:
    """Return TensorBoard's page of charts: the main metrics, then the charts of the dashboards group by group.

    A metric with an interval has its own chart with a band. ``adapted``: only the main metrics of an adaptation.
    """
    main = sorted(row.main for row in METRICS if row.main and (row.part == "adapt") == adapted)
    charts: Layout = {"main": {name: ("Multiline", [f"{MAIN_GROUP}/{name}"]) for name in main}}
    for chart in () if adapted else CHARTS:
        rows = [row for row in METRICS if chart.title in (row.panel, row.chart) and row.name != "step"]
        lines = [_pattern(row) for row in rows if not row.interval]
        drawn = charts.setdefault(chart.group, {})
        if lines:
            drawn[chart.title] = ("Multiline", lines)
        for row in (row for row in rows if row.interval):
            name = tracker_name(row.name)
            drawn[f"{chart.title}: {row.label}"] = ("Margin", [name, f"{name}_low", f"{name}_high"])
    return charts


def _pattern(row: MetricRow) -> str:
    """Return a regular expression for a row's name in trackers, with any position for K."""
    return f"^{tracker_name(row.name).replace('/K', '/[0-9]+')}$"


def document() -> str:
    """Return the text of ``docs/metrics.md``."""
    text = (
        "# Metrics\n\nWritten by `python -m bebop.metrics.catalogue > docs/metrics.md` from "
        "`bebop/metrics/catalogue.py`. K is a draft position, from 1 on,\n"
        "and N the first turn of a kind: 0, 1, 2 (2 and 3), 4 (4 to 7), 8, ... "
        "A name without data is absent:\nplain decoding has no acceptance rate. "
        "Names marked ± come with `..._low` and `..._high`, their 95 % interval.\n"
        f"TensorBoard, W&B and Trackio show the most important ones first, as `{MAIN_GROUP}/...`,\n"
        "and `drift/...` last, as `z_drift/...`.\n"
    )
    for part, title in TITLES.items():
        text += f"\n## {title}\n\n| name | meaning | unit |\n|---|---|---|\n"
        for row in METRICS:
            if row.part == part:
                needs = f" (with {row.rare})" if row.rare else ""
                text += f"| `{row.name}`{' ±' * row.interval} | {row.meaning}{needs} | {row.unit} |\n"
    return text


def main(arguments: list[str]) -> int:
    """Print ``docs/metrics.md``."""
    if arguments:
        raise UserError(f"{arguments[0]!r} is not wanted: python -m bebop.metrics.catalogue takes nothing")
    sys.stdout.write(document())
    return 0


if __name__ == "__main__":
    run_main(main)
