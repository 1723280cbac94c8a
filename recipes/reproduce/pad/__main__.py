"""``python -m recipes.reproduce.pad``: keep rejected drafts by a classifier, and by controls; see README.md."""

from pathlib import Path

from recipes.reproduce.cli import start
from recipes.reproduce.pad import analysis, charts, decoding
from recipes.reproduce.pad.classifiers import STEPS, HeldOut, Kind, fitted, tested
from recipes.reproduce.pad.labels import FEWEST, LAYERS, ROLLOUTS, TOL, labelled, prepare
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import DEPTH, SEEDS, everywhere, results_folder

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Train the classifiers, test them, decode with every arm, judge, draw and store the results."""
    started = begin("pad")
    everywhere(prepare, ("head", "skewed"), "states")
    keys = [(drafter, seed) for drafter in decoding.DRAFTERS for seed in SEEDS]
    runs = dict(zip(keys, everywhere(decoding.run, keys, "decoding"), strict=True))
    tests = classifiers()
    tables = {
        "Test prompts, drafts of the head": analysis.decoding_table(runs, "head"),
        "Test prompts, sharpened drafts": analysis.decoding_table(runs, "skewed"),
        "By seed": analysis.seed_table(runs, tests),
        "Classifiers": analysis.classifier_table(tests),
        "Calibration": analysis.calibration_table(tests),
        "Labels": analysis.label_table(),
    }
    figures = charts.draw(runs, tests, HERE / "figures")
    plan = {
        "labelled_prompts": FEWEST, "candidates": {name: len(labelled(name).rows) for name in ("head", "skewed")},
        "rollouts": ROLLOUTS, "tol": TOL, "steps": STEPS, "taus": decoding.TAUS, "p_min": decoding.P_MIN,
        "draft_tokens": DEPTH, "validation": decoding.VALIDATION, "test": decoding.TEST, "seeds": SEEDS,
    }  # fmt: skip
    keep(HERE, started, analysis.numbers(runs, tests), tables, figures, plan, analysis.facts(runs))


def classifiers() -> dict[str, HeldOut]:
    """Train every kind of classifier for each seed and test it on that seed's test prompts."""
    one = Kind()
    kinds: dict[str, tuple[Kind, str]] = {
        "head": (one, "head"), "skewed": (one, "skewed"), "head, trained on it alone": (Kind(train=("head",)), "head"),
        "skewed, trained on the head's alone": (Kind(train=("head",)), "skewed"),
        "head, hidden": (Kind(features="hidden"), "head"), "head, scalars": (Kind(features="scalars"), "head"),
        "head, state of the candidate": (Kind(position="cand"), "head"),
        "head, paper's definition": (Kind(definition="paper"), "head"),
    }  # fmt: skip
    kinds |= {f"head, layer {layer}": (Kind(layer=layer), "head") for layer in LAYERS if layer != one.layer}
    kinds |= {f"head, {k} continuations": (Kind(k=k), "head") for k in (1, 2, 4, 8)}
    kinds |= {f"head, tol {tol}": (Kind(tol=tol), "head") for tol in (0.0, 0.2, 0.3)}
    trained = {kind: fitted(kind) for kind in dict.fromkeys(kind for kind, _ in kinds.values())}
    return {name: tested(kind, on, trained[kind]) for name, (kind, on) in kinds.items()}


if __name__ == "__main__":
    start(main, __doc__)
