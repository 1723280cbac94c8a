"""Four losses, two amounts of data, three seeds, a full adaptation each; README.md says what counts."""

from dataclasses import asdict
from pathlib import Path

from recipes.reproduce.measured import Number, of
from recipes.reproduce.objectives.comparison import (
    DECODED,
    FEW,
    Job,
    Results,
    decoded,
    draw_lengths,
    gain,
    half_less_greedy,
    over_seeds,
    row,
    run_all,
)
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import QUICK, SEEDS, SEQUENCES, Arm, results_folder

HERE = results_folder(Path(__file__).parent)
LOSSES = ("hard_ce", "ce", "nla", "e2e_tv")
DATA = {"": SEQUENCES, ", few": FEW}
STEPS = 4 if QUICK else 200


def jobs() -> list[Job]:
    """Every loss with both amounts of data, seed by seed; the head as it came beside them."""
    listed: list[Job] = []
    for seed in SEEDS:
        listed.append(("start", None, seed))
        for label, count in DATA.items():
            listed += [(f"{loss}{label}", arm_of(loss, seed, count), seed) for loss in LOSSES]
    return listed


def arm_of(loss: str, seed: int, sequences: int = SEQUENCES) -> Arm:
    """A whole adaptation."""
    return Arm(objective=loss, seed=seed, steps=STEPS, sequences=sequences)


def main() -> None:
    """Run all arms, judge, draw, write."""
    started = begin("budget")
    results, labels = run_all("budget", jobs())
    tables = {
        "Objectives": [row(results, label) for label in labels],
        "Decoded": [line for label in DECODED for line in decoded(results, label)],
    }
    draw_lengths(HERE / "figures" / "budget.svg", results, labels)
    figures = {
        "budget.svg": f"Accept length after {STEPS} steps with {SEQUENCES} answers and with {FEW} (few); sampled "
        "drafts (left), greedy drafts (right); mean of three seeds and its 95 % interval."
    }
    plan = {**asdict(arm_of("", seed=0)), "few": FEW, "seeds": SEEDS}
    keep(HERE, started, numbers(results), tables, figures, plan)


def numbers(results: Results) -> dict[str, Number]:
    """What the rules speak of."""

    def gained(a: str, b: str, name: str = "accept_length") -> Number:
        return of(gain(results, a, b, name), len(SEEDS))

    by_name: dict[str, Number] = {}
    for label in DATA:
        for loss in LOSSES:
            arm = f"{loss}{label}"
            by_name[f"length {arm}"] = of(over_seeds(results, arm, "accept_length"), len(SEEDS))
            by_name[f"greedy {arm}"] = of(over_seeds(results, arm, "accept_length_greedy"), len(SEEDS))
        by_name |= {f"e2e_tv - {base}{label}": gained(f"e2e_tv{label}", f"{base}{label}") for base in LOSSES[:-1]}
    by_name["e2e_tv - start"] = gained("e2e_tv", "start")
    by_name["greedy: e2e_tv - hard_ce"] = gained("e2e_tv", "hard_ce", "accept_length_greedy")
    by_name["half the gain - greedy gain"] = half_less_greedy(results, "e2e_tv", "hard_ce")
    return by_name
