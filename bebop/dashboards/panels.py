"""The panels of the dashboard as a table: title, PromQL, unit, description."""

from dataclasses import dataclass

from bebop.monitor.drift_monitor import STATES

SESSION = 'SessionName=~"$SessionName"'  # the dashboard's variable; Ray labels every series with its session
DRIFT, COTRAIN = "the monitor's decomposition", "co-training of the head"
CERTIFICATE = "the certificate (monitor.certify_every) and an exact decoding system"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression and what its lines are called."""

    expr: str
    legend: str  # with Grafana's {{label}}
    band_of: str | None = None  # the lower edge of an interval has none; the upper edge names the lower one's legend


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure."""

    title: str
    description: str
    unit: str  # tokens, nats, share, s, ...
    queries: tuple[Query, ...]
    needs: str = ""  # without which a run has none of these numbers
    states: tuple[str, ...] = ()  # names of the values 0, 1, ...: drawn as a timeline


def series(name: str) -> str:
    """The name under which Prometheus knows a metric of ``metrics.jsonl``."""
    return "ray_bebop_" + name.replace("/", "_")


def gauge(name: str, legend: str) -> Query:
    """A metric as it is."""
    return Query(expr=f"{series(name)}{{{SESSION}}}", legend=legend)


def by_position(name: str, legend: str) -> Query:
    """A metric that has a name per draft position, ``name/1``, ``name/2``, ..."""
    selected = f'{{__name__=~"{series(name)}_[0-9]+",{SESSION}}}'
    labelled = f'label_replace({selected}, "position", "$1", "__name__", ".+_([0-9]+)")'
    return Query(expr=labelled, legend=f"{legend} {{{{position}}}}")


def estimate(name: str, legend: str) -> tuple[Query, ...]:
    """A number with its 95 % interval, which is drawn as a band."""
    low, high = f"{legend}, low", f"{legend}, high"
    return (
        gauge(name, legend),
        gauge(f"{name}_low", low),
        Query(expr=gauge(f"{name}_high", high).expr, legend=high, band_of=low),
    )


def _parts(name: str) -> tuple[Query, ...]:
    return (
        *estimate(f"drift/{name}/change", "change"),
        *estimate(f"drift/{name}/entropy", "entropy part"),
        *estimate(f"drift/{name}/mismatch", "mismatch part"),
    )


DRAFTING = (
    Panel(
        title="Accept length",
        description="Accepted drafts + 1 per cycle of draft and verification.",
        unit="tokens",
        queries=(gauge("rollout/accept_length", "accept length"),),
    ),
    Panel(
        title="Acceptance by draft position",
        description="Share of drafts accepted at each position, among the cycles that reached it.",
        unit="share",
        queries=(by_position("rollout/accept_rate", "position"),),
    ),
    Panel(
        title="Why the accept length moved",
        description="Change against the first steps = part that the policy's entropy explains + part that the head "
        "not fitting the policy explains. Bands: 95 %. No parts are drawn while they cannot be told apart.",
        unit="tokens",
        queries=_parts("length"),
        needs=DRIFT,
    ),
    Panel(
        title="The same on fixed contexts",
        description="Change of the acceptance rate at the first draft position on contexts of the first step, read "
        "again under the weights of now, so that other answers play no part. Bands: 95 %.",
        unit="share",
        queries=_parts("bank"),
        needs=DRIFT,
    ),
    Panel(
        title="State of the draft",
        description="What the monitor concludes. broken: drafts are as good as chance, the engine does not run the "
        "weights that it should, or its answers do not follow the policy's distribution.",
        unit="",
        queries=(gauge("drift/state", "state"),),
        needs=DRIFT,
        states=STATES,
    ),
    Panel(
        title="Entropy",
        description="Of the distribution trained on, over answer tokens; of the model's and the head's distribution, "
        "over verified draft positions.",
        unit="nats",
        queries=(
            gauge("policy/entropy", "policy"),
            gauge("rollout/target_entropy", "model at drafts"),
            gauge("draft/entropy", "head at drafts"),
        ),
    ),
    Panel(
        title="Sampled against greedy drafts",
        description="The rate at which sampled drafts are accepted, sum of min(p, q), and the rate for the head's "
        "most likely token, p(argmax q). Where the second is larger, decoding=target_only would accept more.",
        unit="share",
        queries=(by_position("rollout/overlap", "sampled"), by_position("rollout/target_only", "greedy")),
    ),
    Panel(
        title="Sampled minus greedy",
        description="Overlap minus p(argmax q) with its 95 % interval. Below zero, greedy drafts are accepted more.",
        unit="share",
        queries=estimate("drift/boundary", "difference"),
        needs=DRIFT,
    ),
)
LEARNING = (
    Panel(
        title="Reward",
        description="Mean over the answers trained on, and the spread within a group.",
        unit="reward",
        queries=(gauge("reward/mean", "mean"), gauge("reward/std", "spread in a group")),
    ),
    Panel(
        title="Groups without a signal",
        description="Share of groups in which no answer, or every answer, is solved.",
        unit="share",
        queries=(gauge("reward/solve_none", "none solved"), gauge("reward/solve_all", "all solved")),
    ),
    Panel(
        title="Response length",
        description="Tokens of an answer, stop token included.",
        unit="tokens",
        queries=(gauge("response/length", "mean"), gauge("response/length_max", "largest")),
    ),
    Panel(
        title="Answers cut off",
        description="Share of answers that reached the length limit.",
        unit="share",
        queries=(gauge("response/truncated", "cut off"),),
    ),
    Panel(
        title="Gradient norm of the policy",
        description="Before clipping.",
        unit="",
        queries=(gauge("train/grad_norm", "norm"),),
    ),
    Panel(
        title="Trainer against engine",
        description="Ratio of the trainer's probability of a token to the engine's. Its largest distance from 1 on "
        "tokens of the weights in force is rounding, or a bug. Beside it the mean distance of their log-probs.",
        unit="",
        queries=(
            gauge("train/ratio_mean", "mean"),
            gauge("train/ratio_error_max", "largest distance from 1"),
            gauge("rollout/logprob_diff", "log-probs"),
        ),
    ),
    Panel(
        title="Certificate of the answers",
        description="Evidence that answers do not follow the trainer's distributions, ln E. As long as they do, it "
        "stays around or below 0, and reaches 9.2 in one run of 10,000.",
        unit="nats",
        queries=(gauge("certify/log_e", "ln E"),),
        needs=CERTIFICATE,
    ),
    Panel(
        title="What the certificate has not seen yet",
        description="The largest bound on what kinds of faults may still hide, as total variation a token.",
        unit="share",
        queries=(gauge("certify/tv_bound", "largest bound"),),
        needs=CERTIFICATE,
    ),
    Panel(
        title="Head: loss",
        description="Loss of the head that is trained beside the policy.",
        unit="",
        queries=(gauge("head/loss", "loss"),),
        needs=COTRAIN,
    ),
    Panel(
        title="Head: gradient norm",
        description="Before clipping; the head has an optimizer and a norm of its own.",
        unit="",
        queries=(gauge("head/grad_norm", "norm"),),
        needs=COTRAIN,
    ),
)
RUNNING = (
    Panel(
        title="Answer tokens per second",
        description="Answer tokens of the groups that came in, over the duration of the step.",
        unit="tokens/s",
        queries=(gauge("rollout/tokens_per_s", "tokens/s"),),
    ),
    Panel(
        title="Staleness",
        description="Updates between the weights that produced a token and those it trains.",
        unit="updates",
        queries=(gauge("staleness/mean", "mean"), gauge("staleness/max", "largest")),
    ),
    Panel(
        title="Time of a step",
        description="The trainer waits, updates and publishes one after another; workers decode beside it.",
        unit="s",
        queries=(
            gauge("time/step", "step"),
            gauge("time/idle", "trainer waits"),
            gauge("time/update", "update"),
            gauge("time/sync", "weight sync"),
            gauge("time/rollout", "decoding"),
            gauge("time/rollout_idle", "workers wait"),
        ),
    ),
    Panel(title="Progress", description="Finished updates.", unit="updates", queries=(gauge("step", "step"),)),
    Panel(
        title="Restarts and skipped steps",
        description="Rollout workers replaced so far; optimizer steps of the last update that were skipped because "
        "the gradient was not finite.",
        unit="",
        queries=(gauge("rollout/restarts", "workers replaced"), gauge("train/skipped", "steps skipped")),
    ),
)
ROWS = {"Bebop: drafting": DRAFTING, "Bebop: learning": LEARNING, "Bebop: running": RUNNING}
