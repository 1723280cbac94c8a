"""Numbers of the rules and tables, computed from rounds, cards of parts, and sweeps."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop.adaptation.corpus import question_streams, run_engine
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import from_dict
from bebop.metrics.intervals import Array, across_seeds, resampled
from bebop.model.checkpoint import load_policy
from bebop.systems.block.losses import Evaluated, split
from bebop.systems.block.network import FEATURES, PromptEnd
from bebop.systems.block.training import BlockLengthTrainer, prompt_ends, system_of
from bebop.systems.pad.labels import Rollouts, loss_of_value, split_of
from bebop.systems.pad.training import LABELS, PivotAdaptation, PivotTraining, read_rollouts, scores
from bebop.trajectory import Prompt
from recipes.reproduce import study
from recipes.reproduce.measured import Number, of
from recipes.reproduce.real_systems.parts import model_config, part_path, settings
from recipes.reproduce.real_systems.plan import OPEN, SHARE, Sizes
from recipes.reproduce.real_systems.rounds import PLAIN, Round
from recipes.reproduce.study import QUICK

Rounds = Mapping[str, Sequence[Round]]  # by setting
TRANSFERRED = 4 if QUICK else 40  # prompts with two completions for each size
PAIRS = (  # (setting, arm, base): differences that rules and tables speak of
    ("open, greedy", "FIRP, tree", "MTP, tree"),
    ("blocks, greedy", "BlockPilot", "block"),
    ("words", "PAD 0.3", "MTP"),
)


def of_rounds(found: Rounds) -> dict[str, Number]:
    """Return every arm's speed over plain decoding, tokens per cycle, reward, entropy, and the differences of
    ``PAIRS``.
    """
    numbers: dict[str, Number] = {}

    def put(name: str, values: Sequence[float]) -> None:
        if len(values) > 1 and not np.isnan(values).any():
            numbers[name] = of(across_seeds([*values]), len(values))

    for setting, rounds in found.items():
        for arm in rounds[0] if rounds else ():
            put(f"{setting}, {arm}: x plain", [one[arm].speed / one[PLAIN].speed for one in rounds])
            put(f"{setting}, {arm}: length", [one[arm].length for one in rounds])
            put(f"{setting}, {arm}: reward", [one[arm].reward for one in rounds])
            put(f"{setting}, {arm}: entropy", [one[arm].entropy for one in rounds])
    for setting, arm, base in PAIRS:
        rounds = [one for one in found.get(setting, ()) if arm in one and base in one]
        put(f"{setting}, {arm} - {base}: length", [one[arm].length - one[base].length for one in rounds])
        put(f"{setting}, {arm} - {base}: reward", [one[arm].reward - one[base].reward for one in rounds])
    return numbers | _pipo(found.get("word", ()), put, numbers)


def _pipo(
    rounds: Sequence[Round], put: Callable[[str, Sequence[float]], None], numbers: dict[str, Number]
) -> dict[str, Number]:
    """Return the numbers of the rules on PIPO: rewards at each gate, the teacher, and the random gate."""
    for gate in ("all kept", "part", "none kept"):
        for base in ("SFT", "more SFT"):
            own = [one for one in rounds if {f"OPD, {gate}", f"{base}, {gate}"} <= one.keys()]
            values = [one[f"OPD, {gate}"].reward - one[f"{base}, {gate}"].reward for one in own]
            put(f"word, OPD, {gate} - {base}", values)
    own = [one for one in rounds if "SFT, none kept" in one]
    put("word, teacher - SFT", [one[PLAIN].reward - one["SFT, none kept"].reward for one in own])
    own = [one for one in rounds if {"OPD, part", "OPD, random"} <= one.keys()]
    put("word, OPD, confidence - random", [one["OPD, part"].reward - one["OPD, random"].reward for one in own])
    put("word, OPD, pad ratios apart", [abs(one["OPD, part"].length - one["OPD, random"].length) for one in own])
    return numbers


# ---- numbers from the parts' own reports and files


def of_pad(place: Path, sizes: Sizes) -> dict[str, Number]:
    """Return how well the classifier separates pivots on the test prompts, and what its choice costs."""
    path = place / "pivot" / LABELS
    if not part_path(place, "pivot").is_file() or not path.is_file():
        return {}
    config = from_dict(AdaptConfig, {**settings(place, sizes, "pivot", resume=True)})
    test = [row for row in read_rollouts(path) if split_of(row.prompt, config.seed) == "test"]
    job = PivotAdaptation(config, place / "pivot")
    network = load_policy(model_config(place, sizes, ["pivot"]), need_head=True, needs=("pivot",)).parts["pivot"].cpu()
    given = scores(network, job.examples(test))  # type: ignore[arg-type]
    results = json.loads((place / "pivot" / "results.json").read_text())["splits"]["test"]
    area = results["auc"]
    return {
        "AUC": Number(value=area["value"], low=area["low"], high=area["high"]),
        "share of pivots": Number(value=results["pivots"], low=results["pivots"], high=results["pivots"]),
        **choice(test, given, config.of(PivotTraining).rollouts),
    }


def choice(test: Sequence[Rollouts], given: Array, rollouts: int) -> dict[str, Number]:
    """Return the change in the chance of success from keeping the share ``SHARE`` of candidates with the lowest scores.

    ``classifier - random`` compares with as many random candidates, whose expectation is the mean of all candidates.
    The bootstrap is over prompts; the candidates are chosen once, on all prompts.
    """
    losses = loss_of_value(test, "residual", 0, rollouts)
    chosen = np.zeros(len(test))
    chosen[np.argsort(given, kind="stable")[: max(1, round(SHARE * len(test)))]] = 1.0
    prompts, place = np.unique([row.prompt for row in test], return_inverse=True)

    def change(weights: Array, taken: Array) -> Array:
        own = weights[:, place] * taken
        return np.asarray(-(own @ losses) / np.maximum(own.sum(1), 1e-9))

    everyone = np.ones(len(test))
    return {
        "classifier, change": of(resampled(lambda w: change(w, chosen), len(prompts))),
        "classifier - random": of(resampled(lambda w: change(w, chosen) - change(w, everyone), len(prompts))),
    }


def of_block(place: Path, sizes: Sizes) -> dict[str, Number]:
    """Return the worth of choosing a block size on held-out prompts, and the number of training prompts."""
    from bebop.model.parts import read_card

    path = part_path(place, "block_length")
    if not path.is_file():
        return {}
    value, low, high = read_card(path).results["share"]
    swept = json.loads(next((place / "block_length").glob("sweep-*.json")).read_text())
    trained = float(len(split(len(swept), 0)[0]))
    return {
        "share": Number(value=value, low=low, high=high),
        "training prompts": Number(value=trained, low=trained, high=trained),
    }


def transfer(place: Path, sizes: Sizes, progress: Callable[[], object]) -> dict[str, Number]:
    """Return the relative gain, in another completion of a prompt, of the block sizes that are best in one completion.

    The gain is in tokens per cycle. Each size gives two completions of each prompt at the temperature of open
    questions. The gain in the completion that sizes are chosen on comes partly from noise; the gain in the other one
    does not.
    """
    if not part_path(place, "block").is_file():
        return {}
    options = sizes.options["block_length"]
    candidates = range(int(options["smallest"]), int(options["largest"]) + 1)
    config = from_dict(AdaptConfig, settings(place, sizes, "block"))
    policy = load_policy(model_config(place, sizes, ["block"]), needs=("block",))
    prompts: list[Prompt] = question_streams(config, policy)[0][-TRANSFERRED:]
    tables = []
    for seed in (0, 1):
        columns = []
        for size in candidates:

            def swept(size: int = size, seed: int = seed) -> list[float]:
                answers = run_engine(policy, prompts, config.data, system_of(size), 77 + seed)
                return [answer.stats.emitted / answer.stats.cycles for answer in answers]

            made = part_path(place, "block").stat().st_mtime_ns
            columns.append(
                study.once("real_systems", f"transfer-{size}-{seed}", (sizes, OPEN, TRANSFERRED, made), swept)
            )
            progress()
        tables.append(np.array(columns).T)
    return gains(*tables)


def gains(first: Array, second: Array) -> dict[str, Number]:
    """Return gains of sizes chosen in ``first`` [N, C], relative to the tokens per cycle of the best fixed size.

    Intervals are bootstraps over prompts.
    """
    fixed = int(first.mean(0).argmax())
    rows, chosen = np.arange(len(first)), first.argmax(1)

    def gain(table: Array) -> Number:
        own, base = table[rows, chosen], table[:, fixed]
        return of(resampled(lambda w: np.asarray((w @ own) / (w @ base)) - 1, len(rows)))

    return {"apparent gain": gain(first), "transferred gain": gain(second)}


# Inputs of a choice of block sizes beside the raw logits: those that BlockPilot found worse, and normalised logits.
SEEN: Mapping[str, Callable[[PromptEnd], Tensor]] = {
    **FEATURES,
    "logits, normalised": lambda end: (end.logits - end.logits.mean(1, keepdim=True)) / end.logits.std(1, keepdim=True),
    "logits, softmax": lambda end: end.logits.softmax(-1),
}
WIDTHS = (16, 256)  # of the hidden layers, beside the 64 of the product


def ablations(place: Path, sizes: Sizes, progress: Callable[[], object]) -> list[dict[str, Any]]:
    """Return one line per way to choose a block size: its input, its width and its accuracy.

    All are trained on the same sweep.
    """
    path = part_path(place, "block_length")
    if not path.is_file():
        return []
    config = from_dict(AdaptConfig, settings(place, sizes, "block_length", resume=True))
    job = BlockLengthTrainer(config, place / "block_length")
    prompts = job.prompts()
    sweep, end = job.sweep(prompts), prompt_ends(job.policy, prompts)
    width = job.options.hidden
    lines = []
    for name, hidden in [*((name, width) for name in SEEN), *(("logits", other) for other in WIDTHS)]:

        def made(name: str = name, hidden: int = hidden) -> Evaluated:
            torch.manual_seed(config.seed)
            job.options = replace(job.options, hidden=hidden)
            return job.train(replace(sweep, features=SEEN[name](end)), None)[2]

        key = (sizes, path.stat().st_mtime_ns)
        one = study.once("real_systems", f"size by {name}, {hidden}", key, made)
        line: dict[str, Any] = {"sees": name, "width": hidden, "accuracy": one.accuracy}
        lines.append(
            {
                **line,
                "share of the oracle's gain": one.share,
                **{arm: one.tau[arm] for arm in ("predicted", "best_fixed", "oracle")},
            }
        )
        progress()
    return lines


def table(found: Rounds) -> list[dict[str, Any]]:
    """Return one line per setting and arm."""
    numbers = of_rounds(found)
    lines: list[dict[str, Any]] = []
    for setting, rounds in found.items():
        for arm in rounds[0] if rounds else ():
            row: dict[str, Any] = {"questions": setting, "arm": arm, "rounds": len(rounds)}
            for what in ("x plain", "length", "reward", "entropy"):
                row[what] = numbers.get(f"{setting}, {arm}: {what}")
            lines.append(row)
    return lines
