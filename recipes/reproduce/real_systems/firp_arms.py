"""FIRP beside Medusa heads and early exits on SmolLM2: the arms of ``recipes.reproduce.firp`` on another model.

That study's code trains and measures the arms, and stores each matrix as it is trained. Only the text and the layers
differ. The training completions are those of the part ``firp``, and the model has thirty layers in place of twelve.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np

from bebop.adaptation.corpus import CORPUS, drafting_config, question_streams, read_corpus, run_engine, token_rows
from bebop.config.adapt import AdaptConfig
from bebop.config.fields import from_dict
from bebop.config.job import SamplingConfig
from bebop.errors import UserError
from bebop.metrics.intervals import Array, resampled
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.systems.firp.network import RealText, middle_layers, read_text
from bebop.trainer.chains import TokenRow
from bebop.trajectory import Prompt
from recipes.reproduce.firp.arms import Arm
from recipes.reproduce.firp.measures import NODES, Measured, measured
from recipes.reproduce.firp.texts import Seed, Texts, once
from recipes.reproduce.measured import Number, of
from recipes.reproduce.real_systems.parts import model_config, settings
from recipes.reproduce.real_systems.plan import OPEN, Sizes
from recipes.reproduce.study import QUICK

NUMBER = 4_000  # number of this text in the cache of the FIRP study, whose own texts are 0 to 2
ANSWERS = 6 if QUICK else 400
CALIBRATION, HELD_OUT = (4, 4) if QUICK else (32, 48)
UPDATES = 2 if QUICK else 150  # of each step
SHORT = 1 if QUICK else 60  # in the sweep over layers
STEPS = 3
RIVALS = {"Medusa heads": ("Medusa", "Medusa, KL"), "early exits": ("early exits",)}  # the best of several counts


class RealSeed(Seed):
    """Texts of the FIRP study on the model of this study; see ``Seed``."""

    # The logits of two texts, every place and step, over 49,152 tokens take 80 MB a copy, and there are eight copies.
    batch = 2

    def __init__(self, place: Path, sizes: Sizes) -> None:
        self.number, self.place, self.sizes = NUMBER, place, sizes
        self.texts = once("real texts", (sizes.model, OPEN, ANSWERS, CALIBRATION, HELD_OUT), self._answers)

    @cached_property
    def policy(self) -> Policy:
        """Return the model, frozen and in float32, as the heads are trained in it."""
        model = load_policy(model_config(self.place, replace(self.sizes, dtype="float32")))
        model.backbone.requires_grad_(False)
        return model

    def read(self, rows: Sequence[TokenRow]) -> list[RealText]:
        """Return the real hidden states of some completions, after the layers that the arms read."""
        return read_text(self.policy, layers_read(self.depth), [row.token_ids for row in rows])

    @property
    def depth(self) -> int:
        """Return the number of layers of the model."""
        return int(self.policy.backbone.config.num_hidden_layers)

    def _answers(self) -> Texts:
        path = self.place / "firp" / CORPUS
        if not path.is_file():
            raise UserError(f"{path} is not there: run first --stage parts --system firp")
        config = from_dict(AdaptConfig, settings(self.place, self.sizes, "firp"))
        training, held_out = question_streams(config, self.policy)
        greedy = SamplingConfig(temperature=0.0, max_new_tokens=config.data.sampling.max_new_tokens)

        def written(prompts: Sequence[Prompt], number: int, sampling: SamplingConfig | None = None) -> list[TokenRow]:
            decoding = drafting_config(self.policy)
            return token_rows(
                prompts, run_engine(self.policy, prompts, config.data, decoding, number, None, sampling=sampling)
            )

        return Texts(
            training=read_corpus(path)[:ANSWERS],
            calibration=written(training[:CALIBRATION], NUMBER, greedy),
            greedy=written(held_out[:HELD_OUT], NUMBER, greedy),
            sampled=written(held_out[:HELD_OUT], NUMBER + 1),
        )


def swept_layers(depth: int) -> tuple[int, ...]:
    """Return the layers in the sweep of step 1, from low to high; the third is the middle."""
    return (max(1, depth // 15), depth // 4 + 1, depth // 2, 3 * depth // 4, depth - 2)


def layers_read(depth: int) -> tuple[int, ...]:
    """Return the layers after which states are stored for all arms."""
    return tuple(sorted({*middle_layers(depth), *swept_layers(depth)}))


def arms(depth: int) -> dict[str, Arm]:
    """Return the arms by name; those of the sweep come last."""
    middle, whole = tuple(middle_layers(depth)), (UPDATES,) * STEPS
    main = {
        "FIRP": Arm(kind="firp", layers=middle, updates=whole),
        "Medusa": Arm(kind="medusa", objective="hard_ce", layers=middle, updates=whole),
        "Medusa, KL": Arm(kind="medusa", layers=middle, updates=whole),
        "early exits": Arm(kind="exit", layers=middle, updates=whole),
    }
    return main | {f"step 1 at {t}": Arm(kind="firp", layers=(t,), updates=(SHORT,)) for t in swept_layers(depth)}


def compare(own: RealSeed, progress: Callable[[], object]) -> dict[str, Measured]:
    """Train and measure every arm without stored results; return the results of all arms."""
    found = {}
    for name, arm in arms(own.depth).items():
        found[name] = measured(own, arm)
        progress()
    return found


def numbers(found: dict[str, Measured], depth: int) -> dict[str, Number]:
    """Return the numbers of the rules.

    Intervals are bootstraps over held-out prompts; both sides of a difference use the same draws.
    """

    def length(arm: str, nodes: int, weights: Array) -> Array:
        one = found[arm]
        return np.asarray((weights @ one.tokens) / (weights @ one.cycles[nodes]))

    count = len(found["FIRP"].tokens)
    values: dict[str, Number] = {}
    for nodes in NODES:
        for name in found:
            if nodes in found[name].cycles and not name.startswith("step 1"):
                values[f"length {nodes}, {name}"] = of(resampled(lambda w, a=name, n=nodes: length(a, n, w), count))  # type: ignore[misc]
        for rival, names in RIVALS.items():

            def best(weights: Array, names: Sequence[str] = names, nodes: int = nodes) -> Array:
                # The best rival is chosen once, on all prompts, and not again in each resampling.
                chosen = max(names, key=lambda one: found[one].length(nodes))
                return length(chosen, nodes, weights)

            values[f"length {nodes}, {rival}"] = of(resampled(best, count))
            values[f"length {nodes}, FIRP - {rival}"] = of(
                resampled(lambda w, b=best, n=nodes: length("FIRP", n, w) - b(w), count)  # type: ignore[misc]
            )
    return values | {"layers, spread over loss": of(resampled(lambda w: _spread(found, depth, w), count))}


def accuracy(one: Measured, weights: Array) -> Array:
    """Return how often step 1 predicts the actual token, for each row of weights over prompts."""
    return np.asarray((weights @ one.hits[:, 0, 0]) / (weights @ one.places[:, 0]))


def _spread(found: dict[str, Measured], depth: int, weights: Array) -> Array:
    """Return the spread of accuracy over layers up to the middle, divided by the loss from the middle to the highest
    layer.
    """
    by_layer = [accuracy(found[f"step 1 at {layer}"], weights) for layer in swept_layers(depth)]
    low = np.stack(by_layer[:3])
    return np.asarray((low.max(0) - low.min(0)) / np.maximum(by_layer[2] - by_layer[4], 1e-6))


def rows(found: dict[str, Measured]) -> list[dict[str, object]]:
    """Return one line of the table per arm."""
    return [
        {
            "arm": name,
            "parameters": one.parameters,
            **{f"tokens a cycle, {nodes} nodes": one.length(nodes) for nodes in NODES if nodes in one.cycles},
            "accuracy of step 1": one.accuracy(1),
            "tokens a cycle, sampled chain": one.chain,
        }
        for name, one in found.items()
    ]
