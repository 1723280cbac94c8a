"""Predicts the numbers of a recipe with the simulator, and stores them."""

import json
from pathlib import Path
from typing import Any

from bebop.simulation.costs import Costs, emitted
from bebop.simulation.run import simulate
from recipes.cluster.recipe import GIGABYTE, Recipe, trainer_bytes

STORED = Path(__file__).parent / "predictions.json"
WORD = "PREDICTIONS, not measured: roofline arithmetic and simulated engines. No recipe has run on a cluster."
REPORTED = (
    "trajectories_per_second",
    "tokens_per_second",
    "step_seconds",
    "trainer_idle",
    "rollout_idle",
    "staleness_mean",
    "staleness_max",
    "accept_length",
)
DIGITS = 4  # stored


def predict(recipe: Recipe) -> dict[str, float]:
    """Return predicted numbers of the whole job, over the steps that count, and gigabytes per GPU."""
    found = simulate(recipe.simulation)
    numbers = {name: float(getattr(found, name)) for name in REPORTED}
    numbers["speedup"] = speedup(recipe)
    numbers |= waiting(recipe)
    numbers["engine_gb"] = recipe.roofline.engine_bytes() / GIGABYTE
    numbers["trainer_gb"] = trainer_bytes(recipe.file, recipe.job, recipe.roofline) / GIGABYTE
    return {name: float(f"{value:.{DIGITS}g}") for name, value in numbers.items()}


def speedup(recipe: Recipe) -> float:
    """Return the tokens per second of a full engine with drafts, over those without."""
    slots, answers = recipe.roofline.plan.slots, recipe.simulation.completions
    with_drafts = Costs(recipe.roofline.costs(answers.draft_tokens), answers.draft_tokens).cycle(slots)
    without = Costs(recipe.roofline.costs(0), 0).cycle(slots)
    return emitted(answers)[0] * without / with_drafts


def waiting(recipe: Recipe) -> dict[str, float]:
    """Return the extra cost of environments for a trajectory of the most turns, by arithmetic; none of it is simulated.

    The numbers are the seconds of waiting, and the open trajectories of an engine with all its rows in use. The
    third is the gigabytes per engine GPU if the contexts of waiting trajectories stay in memory. A recipe without
    environments returns none.
    """
    task, roofline, answers = recipe.job.task, recipe.roofline, recipe.simulation.completions
    if not task.turns:
        return {}
    slots, costs = roofline.plan.slots, Costs(roofline.costs(answers.draft_tokens), answers.draft_tokens)
    seconds = task.environment.max_turns * recipe.file.environment_seconds
    decoding = roofline.lengths.mean / emitted(answers)[0] * costs.cycle(slots)
    opened = slots * (1 + seconds / decoding)
    context = (roofline.model.layers + 1) * roofline.model.kv_bytes * roofline.lengths.context
    parked = (opened - slots) * context / roofline.plan.tensor_parallel
    return {"waiting_seconds": seconds, "open_trajectories": opened, "waiting_gb": parked / GIGABYTE}


def format_prediction(recipe: Recipe, numbers: dict[str, float]) -> str:
    """Return the prediction as text."""
    fleet, n = recipe.simulation.fleet, numbers
    engines = f"{fleet.workers} engines of {fleet.gpus_per_worker} GPUs, {fleet.slots} rows each"
    rows = {
        "GPUs": f"{recipe.gpus} ({recipe.file.gpu}): {engines}; {fleet.trainer_gpus} of the trainer",
        "answers a step": f"{fleet.groups_per_step} x {fleet.group_size}",
        "trajectories/s": f"{n['trajectories_per_second']:.3g}",
        "tokens/s": f"{n['tokens_per_second']:,.0f}",
        "seconds a step": f"{n['step_seconds']:.3g}",
        "trainer idle": f"{n['trainer_idle']:.0%}",
        "engines idle": f"{n['rollout_idle']:.0%}",
        "staleness": f"{n['staleness_mean']:.2f} updates in the mean, {n['staleness_max']:.0f} at most",
        "accept length": f"{n['accept_length']:.2f} (from assumed rates)",
        "drafts": f"{n['speedup']:.2f} times the tokens/s of plain decoding, all rows in use",
        "memory": f"{n['engine_gb']:.0f} GB on a GPU of an engine, {n['trainer_gb']:.0f} GB on one of the trainer",
    }
    if "waiting_seconds" in n:
        turns, each = recipe.job.task.environment.max_turns, recipe.file.environment_seconds
        rows["environments"] = f"{n['waiting_seconds']:.0f} s of waiting in {turns} turns of {each:g} s (assumed)"
        rows["open"] = f"{n['open_trajectories']:.0f} trajectories of an engine, for all its rows to be in use"
        rows["contexts"] = f"{n['waiting_gb']:.0f} GB on a GPU for those that wait; what does not fit is read again"
    lines = [f"{WORD}\n", f"{recipe.name}: {recipe.file.about}\n"]
    return "".join([*lines, *(f"  {name:16} {value}\n" for name, value in rows.items())])


def table(rows: dict[str, Any]) -> str:
    """Return the contents of ``predictions.json``."""
    return json.dumps({"kind": WORD, "recipes": rows}, indent=1) + "\n"
