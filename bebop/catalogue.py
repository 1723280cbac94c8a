"""Every metric that is logged: its name, what it says, its unit. ``python -m bebop.catalogue`` writes docs/metrics.md.

A K in a name stands for a draft position, from 1 on, an N for the first turn of a kind: 0, 1, 2 (2 and 3), 4 (4 to 7),
8, ... A name without data is absent from a row: plain decoding has no acceptance rate.
"""

import sys
from dataclasses import dataclass
from typing import Literal

from bebop.catalogue_turns import TURNS
from bebop.command import run_main
from bebop.errors import UserError

# Of every run; with environments; with co-training; of the monitor; of the certificate; of one decoding system; of
# bebop.adapt.
Part = Literal["run", "turn", "head", "drift", "certificate", "system", "adapt"]
TITLES: dict[Part, str] = {
    "run": "Every run (`metrics.jsonl`)",
    "turn": "Trajectories of several turns (`task.source=environment`)",
    "head": "The head, in adaptations and where it is trained beside the policy",
    "drift": "The monitor (`monitor.drift=true`), from the sixth step on",
    "certificate": "The certificate (`monitor.certify_every`), at the steps that read it; exact systems alone",
    "system": "What one decoding system counts of its own; by position, over the cycles that reached it",
    "adapt": "Adaptations, on held-out text at `train.eval_every` steps",
}


INEXACT = "answers of an inexact system that says what it drew from"


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric, or one for each draft position."""

    name: str
    meaning: str
    unit: str = ""
    part: Part = "run"
    interval: bool = False  # with name_low and name_high, its 95 % interval
    rare: str = ""  # what it takes, where its part alone does not bring it


def _parts(name: str, of: str, unit: str, rare: str = "") -> tuple[MetricRow, ...]:
    """A change and what it is made of."""
    rows = (
        (f"{name}/change", f"change of {of} against the first five steps", unit),
        (f"{name}/entropy", "the part of it that the change of the target's entropy explains", unit),
        (f"{name}/mismatch", "the rest of it: the head does not fit the policy any more", unit),
        (f"{name}/entropy_change", "change of the target's entropy meanwhile", "nats"),
    )
    return tuple(MetricRow(n, meaning, u, "drift", interval=True, rare=rare) for n, meaning, u in rows)


METRICS: tuple[MetricRow, ...] = (
    MetricRow("step", "finished updates", "updates"),
    MetricRow("version", "version of the weights, which is the same number", "updates"),
    MetricRow("reward/mean", "mean reward of the answers trained on", "reward"),
    MetricRow("reward/std", "spread within a group (population), mean over groups", "reward"),
    MetricRow("reward/solve_none", "share of groups in which no answer has a reward of at least 1", "share"),
    MetricRow("reward/solve_all", "share of groups in which every answer has a reward of at least 1", "share"),
    MetricRow("reward/timeouts", "answers whose reward function hung, and whose reward of 0 means nothing", "answers"),
    MetricRow("response/length", "mean length of an answer, stop token included", "tokens"),
    MetricRow("response/length_max", "largest length of an answer", "tokens"),
    MetricRow("response/truncated", "share of answers cut off by `max_new_tokens`", "share"),
    MetricRow("response/tokens", "answer tokens in the batch", "tokens"),
    MetricRow("policy/entropy", "entropy of the distribution trained on, mean over answer tokens", "nats"),
    MetricRow("draft/entropy", "entropy of the draft's distribution at verified draft positions", "nats"),
    MetricRow("rollout/target_entropy", "entropy of the model's distribution at verified draft positions", "nats"),
    MetricRow(
        "rollout/accept_length",
        "tokens emitted per cycle: accepted drafts + 1, less what the end of an answer cuts off",
        "tokens",
    ),
    MetricRow("rollout/accept_rate/K", "share of accepted drafts at position K, among cycles that reached it", "share"),
    MetricRow(
        "rollout/overlap/K",
        "mean Σ min(p, q) at position K: under rejection sampling the same rate, with less noise",
        "share",
    ),
    MetricRow(
        "rollout/target_only/K",
        "mean p(argmax q) at position K: what greedy drafts would have been accepted with",
        "share",
    ),
    MetricRow(
        "rollout/forwards_per_token",
        "backbone passes an answer took part in, prefill left out, over its tokens",
        "passes",
    ),
    MetricRow(
        "rollout/extra_positions",
        "positions beside the verified ones in a backbone pass, each through some layers, from which later drafts come",
        "positions",
        "system",
    ),
    MetricRow(
        "rollout/tokens_per_s",
        "answer tokens of the groups that came in, over the duration of the step",
        "tokens/s",
    ),
    MetricRow(
        "rollout/logprob_diff",
        "mean distance of the trainer's log p from the engine's, all tokens: staleness included",
        "nats",
    ),
    MetricRow(
        "rollout/logprob_diff_current",
        "mean distance of the trainer's log p *under the weights that produced the token* from the engine's, over "
        "tokens whose whole context those weights computed: rounding, or a bug",
        "nats",
    ),
    MetricRow(
        "rollout/logprob_diff_kept",
        "the same over tokens that saw keys and values of older weights: what keeping them does",
        "nats",
        rare="rollout.on_update=keep",
    ),
    MetricRow("rollout/restarts", "rollout workers replaced so far", "workers"),
    MetricRow(
        "rollout/filtered_groups",
        "groups passed over for the step's batch, since all rewards in them were equal",
        "groups",
        rare="algorithm.dynamic_sampling",
    ),
    MetricRow("staleness/mean", "mean updates between a token's weights and those it trains", "updates"),
    MetricRow("staleness/max", "largest number of them", "updates"),
    MetricRow("train/loss", "policy loss"),
    MetricRow("train/grad_norm", "norm of the gradient before clipping"),
    MetricRow("train/lr", "learning rate"),
    MetricRow("train/skipped", "optimizer steps skipped because the gradient was not finite", "steps"),
    MetricRow(
        "train/ratio_mean",
        "trainer's over engine's probability of a token, at the start of the update",
        "1 if on-policy",
    ),
    MetricRow(
        "train/ratio_error_max", "largest distance of the ratio from 1 on the tokens of `rollout/logprob_diff_current`"
    ),
    MetricRow(
        "train/ratio_error_kept",
        "the same on those of `rollout/logprob_diff_kept`",
        rare="rollout.on_update=keep",
    ),
    MetricRow(
        "train/ratio_tokens",
        "tokens in `train/ratio_error_max`: all of the weights in force, and those of `monitor.check_completions` "
        "answers that older weights produced",
        "tokens",
    ),
    MetricRow("train/clip_frac", "share of tokens whose objective is clipped", "share"),
    MetricRow("train/tis_mean", "mean weight of truncated importance sampling"),
    MetricRow(
        "train/tis_ess",
        "effective sample size of these weights over the tokens: 1 if they are equal",
        "share",
        rare=INEXACT,
    ),
    MetricRow("train/tis_capped", "share of tokens whose weight `algorithm.tis_cap` cuts", "share", rare=INEXACT),
    MetricRow(
        "train/tis_ess_answers",
        "effective sample size of the weights of whole answers, without the cap, over the answers",
        "share",
        rare=INEXACT,
    ),
    MetricRow("train/kl", "KL to the initial policy", "nats", rare="algorithm.kl_coefficient above 0"),
    MetricRow("samples/trained", "answers trained on so far, lost ones counted", "answers"),
    MetricRow("samples/prompts", "prompts trained on so far", "prompts"),
    MetricRow(
        "samples/epoch",
        "epoch of the newest question of the batch: how often all questions were asked before",
        "epochs",
        rare="task.size, or a file of questions",
    ),
    MetricRow("time/step", "duration of the step", "s"),
    MetricRow("time/idle", "part of it in which the trainer waited for answers", "s"),
    MetricRow("time/update", "the update", "s"),
    MetricRow(
        "time/sync",
        "publishing weights (to the last worker in a synchronous job), plus a worker's mean time to take them in",
        "s",
    ),
    MetricRow("time/monitor", "reading the probe set and asking the monitor", "s"),
    MetricRow("time/rollout", "decoding, mean over workers", "s"),
    MetricRow("time/rollout_idle", "neither decoding nor taking in weights, mean over workers", "s"),
    *(MetricRow(name, meaning, unit, "turn", rare=rare) for name, meaning, unit, rare in TURNS),
    MetricRow("head/loss", "loss of the head", part="head"),
    MetricRow("head/grad_norm", "norm of the head's own gradient before clipping", part="head"),
    MetricRow("head/lr", "learning rate of the head", part="head"),
    MetricRow("head/skipped", "steps of the head skipped because the gradient was not finite", "steps", "head"),
    MetricRow("drift/state", "0 steady, 1 entropy-driven, 2 mismatch-driven, 3 broken", part="drift"),
    *_parts("drift/length", "the accept length", "tokens"),
    *_parts("drift/position/K", "the acceptance rate at draft position K", "share"),
    *_parts("drift/bank", "the acceptance rate of the first draft on the probe set", "share", "a step that reads it"),
    *(
        MetricRow(f"drift/slope/{source}", f"slope of the accept length on entropy: {how}", "tokens/nat", "drift", True)
        for source, how in (
            ("early", "early steps"),
            ("frozen", "between answers"),
            ("temperature", "over temperatures"),
        )
    ),
    MetricRow("drift/boundary", "overlap minus p(argmax q): sampled drafts are better above 0", "share", "drift", True),
    MetricRow("drift/length_by_request", "accept length with the same weight for every answer", "tokens", "drift"),
    MetricRow("drift/cotraining", "whether the next update trains the head", "0/1", "drift"),
    MetricRow(
        "certify/log_e",
        "evidence that answers do not follow the trainer's distributions, ln E: as long as they do, it ever reaches "
        "ln 10⁴ = 9.2 in one run of 10,000",
        "nats",
        "certificate",
    ),
    MetricRow("certify/failed", "whether it ever did since it was last begun", "0/1", "certificate"),
    MetricRow("certify/tokens", "tokens that it rests on", "tokens", "certificate"),
    MetricRow(
        "certify/tv_bound",
        "the largest of the bounds on what kinds of faults may still hide, as total variation a token",
        "share",
        "certificate",
    ),
    MetricRow(
        "rollout/overridden/K", "`pad`: share of drafts that were accepted although they failed", "share", "system"
    ),
    MetricRow(
        "rollout/bias/K",
        "`pad`: mean R_N, the distance (total variation) of the emitted distribution from the target's",
        "share",
        "system",
    ),
    MetricRow(
        "rollout/block_size/K",
        "`blockpilot`, `block_ema`: mean size of the blocks that reached position K, the newest token included",
        "tokens",
        "system",
    ),
    MetricRow(
        "rollout/history/K",
        "`history`, `bebop_history`: mean weight w that history had in what the draft was drawn from",
        "share",
        "system",
    ),
    MetricRow(
        "rollout/history_accepted/K",
        "the same, of accepted drafts alone: over rollout/history/K it is how often history's drafts are accepted",
        "share",
        "system",
    ),
    MetricRow(
        "rollout/head_overlap/K",
        "`bebop_history`: mean Σ min(p, m) over first drafts (K is 1), m being the head's own distribution: the "
        "acceptance of the head by itself, where it is asked",
        "share",
        "system",
    ),
    MetricRow(
        "rollout/siblings/K", "`bebop_tree`: mean number of drafts that were tried at depth K", "drafts", "system"
    ),
    MetricRow("rollout/confidence/K", "`pipo`: mean confidence in the drafts of second tokens", "share", "system"),
    MetricRow("eval/accept_length", "accept length of sampled drafts", "tokens", "adapt"),
    MetricRow("eval/accept_length_greedy", "accept length of greedy drafts", "tokens", "adapt"),
    MetricRow("eval/overlap/K", "mean Σ min(p, q) at position K", "share", "adapt"),
    MetricRow("eval/draft_entropy", "entropy of the draft's distribution, first draft", "nats", "adapt"),
)


def names(*parts: Part, position: str = "1") -> set[str]:
    """The names of the parts' metrics, ends of intervals included, with ``position`` for K."""
    numbered = [(row.name.replace("/N/", "/2/").replace("K", position), row) for row in METRICS if row.part in parts]
    listed = [(name, row.interval) for name, row in numbered]
    return {f"{name}{end}" for name, interval in listed for end in (("", "_low", "_high") if interval else ("",))}


def document() -> str:
    """``docs/metrics.md``."""
    text = "# Metrics\n\nWritten by `python -m bebop.catalogue > docs/metrics.md` from `bebop/catalogue.py`. "
    text += "K is a draft position, from 1 on,\nand N the first turn of a kind: 0, 1, 2 (2 and 3), 4 (4 to 7), 8, ... "
    text += "A name without data is absent:\nplain decoding has no acceptance rate. "
    text += "Names marked ± come with `..._low` and `..._high`, their 95 % interval.\n"
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
        raise UserError(f"{arguments[0]!r} is not wanted: python -m bebop.catalogue takes nothing")
    sys.stdout.write(document())
    return 0


if __name__ == "__main__":
    run_main(main)
