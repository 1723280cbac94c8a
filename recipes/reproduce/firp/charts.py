"""Figures of the FIRP study."""

from collections.abc import Sequence
from pathlib import Path

from bebop.metrics.intervals import across_seeds
from recipes.reproduce.figures import band, bars, color, errors, figure
from recipes.reproduce.firp.arms import FIRST, LAYERS, SECOND, STEPS
from recipes.reproduce.firp.comparison import Found
from recipes.reproduce.firp.measures import CHAIN, NODES

# Arm -> name of its colour.
INKS = {"FIRP": "e2e_tv", "Medusa": "hard_ce", "Medusa, KL": "ce", "early exits": "nla", "identity": "start",
        "FIRP, masked": "e2e_tv_corrected"}  # fmt: skip
OBJECTIVES = {"FIRP": "KL", "FIRP, TV": "TV", "FIRP, e2e TV": "e2e TV"}
STEP_INKS = ("e2e_tv", "hard_ce", "nla")
KINDS = {"own": "-", "other": ":"}


def draw(results: Sequence[Found], folder: Path) -> dict[str, str]:
    """Draw all figures; return the caption of each file."""
    accuracy(results, folder / "accuracy.svg")
    layers(results, folder / "layers.svg")
    cosine(results, folder / "cosine.svg")
    objectives(results, folder / "objectives.svg")
    return {
        "accuracy.svg": "How often the likeliest draft of each step is the token that comes in a greedy answer (left), "
        "and tokens a cycle at temperature 0 over the nodes of the tree, 3 being a chain (right); intervals over three "
        "seeds.",
        "layers.svg": "The same accuracy over the layer at which step 1 enters (left) and at which step 2 enters, step "
        "1 being at layer 5 (right), each after fewer updates than the other arms; bands over three seeds.",
        "cosine.svg": "Cosine of a pseudo state with the real state of the token that it stands for (solid) and with "
        "that of another place of the text (dotted), by layer, from where it enters (left); the former without the "
        "mean of all real states (right). Means over three seeds.",
        "objectives.svg": "What FIRP is trained on: tokens a cycle of a sampled chain at temperature 1 (left) and with "
        "16 nodes at temperature 0 (right); intervals over three seeds.",
    }


def accuracy(results: Sequence[Found], path: Path) -> None:
    """Draw accuracy by step, and accept length by number of nodes."""
    with figure(path, 2, 5.0, 3.8) as (left, right):
        for place, (arm, ink) in enumerate(INKS.items()):
            shift = 0.06 * (place - len(INKS) / 2)
            steps = [across_seeds([one.arms[arm].accuracy(k) for one in results]) for k in range(1, STEPS + 1)]
            at = [k + shift for k in range(1, STEPS + 1)]
            left.errorbar(
                at, [i.value for i in steps], errors(steps), fmt="o", ms=4, capsize=2, color=color(ink), label=arm
            )
            lengths = [across_seeds([one.arms[arm].length(n) for one in results]) for n in (CHAIN, *NODES)]
            band(right, (CHAIN, *NODES), lengths, ink, arm, marker="o", ms=3)
        left.set(xlabel="step", ylabel="accuracy", xticks=range(1, STEPS + 1), ylim=(0, 1))
        right.set(xlabel="nodes", ylabel="tokens a cycle", xticks=(CHAIN, *NODES))
        right.legend(fontsize=8)


def layers(results: Sequence[Found], path: Path) -> None:
    """Draw accuracy by the layer at which a step enters, for both sweeps."""
    with figure(path, 2, 4.6, 3.4, sharey=True) as axes:
        for panel, step, swept in zip(axes, (1, 2), (FIRST, SECOND), strict=True):
            found = [across_seeds([one.arms[f"step {step} at {t}"].accuracy(step) for one in results]) for t in swept]
            band(panel, swept, found, STEP_INKS[step - 1], marker="o", ms=4)
            panel.set(xlabel=f"layer at which step {step} enters", ylabel=f"accuracy of step {step}", xticks=swept)
            panel.tick_params(labelleft=True)


def cosine(results: Sequence[Found], path: Path) -> None:
    """Draw cosines over layers."""
    with figure(path, 2, 4.8, 3.6) as (left, right):
        for k, (first, ink) in enumerate(zip(LAYERS, STEP_INKS, strict=True)):
            for kind, dashes in KINDS.items():
                curve = sum(one.cosines[kind][k] for one in results) / len(results)
                at = range(first, len(curve))
                label = f"step {k + 1}" if kind == "own" else None
                left.plot(at, curve[first:], dashes, color=color(ink), label=label, marker="o", ms=3)
            centred = sum(one.cosines["centred"][k] for one in results) / len(results)
            right.plot(
                range(first, len(centred)), centred[first:], color=color(ink), label=f"step {k + 1}", marker="o", ms=3
            )
        left.set(xlabel="after layer", ylabel="cosine")
        right.set(xlabel="after layer", ylabel="cosine, without the mean")
        left.legend(fontsize=8)


def objectives(results: Sequence[Found], path: Path) -> None:
    """Draw tokens per cycle for training on KL, TV and e2e TV."""
    names = list(OBJECTIVES)
    with figure(path, 2, 3.6, 3.2) as (left, right):
        bars(left, names, [across_seeds([one.arms[a].chain for one in results]) for a in names], [*OBJECTIVES.values()])
        greedy = [across_seeds([one.arms[a].length(NODES[0]) for one in results]) for a in names]
        bars(right, names, greedy, [*OBJECTIVES.values()])
        left.set(ylabel="tokens a cycle, chain, T = 1")
        right.set(ylabel="tokens a cycle, 16 nodes, T = 0")
