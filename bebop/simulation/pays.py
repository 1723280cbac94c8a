"""Arithmetic answer to "will speculative decoding pay?" for a card, a model and an acceptance.

The model, in full:

- A pass of the target takes ``launch`` plus ``roofline.pass_seconds``. A cycle of K drafts takes one pass over K + 1
  positions of each row and K steps of the drafter. Each drafter step reads a layer and an output matrix and takes
  ``draft_launch``.
- A cycle commits 1 + a1 + a1 a2 + ... tokens, where ak is the chance of draft k once those before it were accepted.
- The speed-up of a batch is the tokens of a cycle, times the seconds of a plain step over those of a cycle.
- A rollout starts all completions of an engine at once. Their lengths are log-normal. Rows that end are replaced while
  completions wait. Then the batch shrinks to the last row: long tails are decoded in small batches.
- A step of RL gains by Amdahl's law.

Left out: prefill, sampling, engines that differ from one another, and acceptance that depends on length.
"""

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from operator import mul
from statistics import NormalDist
from textwrap import wrap
from typing import Any

from bebop.bench.peaks import measured
from bebop.config.simulate import PaysConfig
from bebop.errors import UserError
from bebop.simulation.roofline import BF16, GIGABYTE, GPUS, Gpu, Model, pass_seconds, read_config, shape

MOST_DRAFTS = 7  # columns of the table
ENGINE_ROWS = 256  # completions that vLLM decodes at once by default, the default completions of a step
BYTES = {"bf16": 2, "fp8": 1}  # of a weight
SIZES = (
    "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocabulary", "experts", "active_experts",
    "expert_intermediate",
)  # fmt: skip
CLOSE = 0.1  # a speed-up this near 1 is undecided: the median error on published ones is about as large
WIDTH = 110  # characters of a line
MARK = (
    "Predicted by arithmetic, not measured; docs/will_it_pay.md says how far off it was on published speed-ups. Gains "
    "of real engines fell earlier with the batch: measure before you rely on a gain at 24 rows or more."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """Reads of one drafter step, and the drafter's own matrices."""

    layers: int  # each as the head of ``Model``
    own_output: bool = False  # a dense layer, and an output matrix over ``draft_vocabulary``; else the target's kind
    remark: str = ""  # appended to the advice


DRAFTERS = {
    "mtp": Drafter(layers=1),
    "eagle": Drafter(layers=1, own_output=True),
    "ngram": Drafter(
        layers=0, remark=" A lookup is counted as free here, which engines that look up on the CPU do not reach."
    ),
}


def resized(model: Model, given: Mapping[str, Any]) -> Model:
    """Return a model with other sizes.

    Raises:
        UserError: A size of attention that this model's cache and projections do not follow from.
    """
    fixed = [name for name in ("hidden", "heads", "kv_heads", "head_dim") if name in given]
    if model.projections is not None and fixed:
        option = fixed[0].replace("_", "-")
        raise UserError(
            f"--{option}={given[fixed[0]]} is not possible: this model's attention is described otherwise (latent or "
            "linear): give --model, a folder with its config.json"
        )
    layers = given.get("layers", model.layers)
    cached = model.cached_layers
    kept = None if cached is None else max(1, round(layers * cached / model.layers))
    return replace(model, dense_layers=min(layers, model.dense_layers), cached_layers=kept, **given)


@dataclass(frozen=True)
class Fleet:
    """Engines of one kind: the resolved question, and the seconds of their passes.

    ``gpu``: shares of peaks and launches of the card, as in ``GPUS``.
    """

    config: PaysConfig
    gpu: Gpu
    model: Model
    name: str  # of the model
    ranks: int  # GPUs of one engine

    @classmethod
    def of(cls, config: PaysConfig, gpus: dict[str, Gpu] | None = None) -> "Fleet":
        """Resolve names and defaults.

        Raises:
            UserError: There is no such card or size, or the model does not fit the GPUs.
        """
        cards = GPUS if gpus is None else gpus
        if config.gpu not in cards:
            raise UserError(f"--gpu={config.gpu!r} is not possible: choose one of {', '.join(cards)}")
        name, model = shape(config.params) if config.model is None else (config.model, read_config(config.model))
        given = {field: getattr(config, field) for field in SIZES if getattr(config, field) is not None}
        if given:
            name, model = f"{name} with {', '.join(f'{k}={v}' for k, v in given.items())}", resized(model, given)
        if model.experts and not 1 <= model.active_experts <= model.experts:
            raise UserError(f"--active-experts={model.active_experts} is not possible: give 1 to {model.experts}")
        if model.experts and not model.expert_intermediate:
            raise UserError("--expert-intermediate=0 is not possible: give the width of one expert")
        gpu = cards[config.gpu]
        fleet = cls(config, gpu, model, name, config.tensor_parallel or 1)
        weights, room = fleet.weight_bytes, gpu.memory * gpu.usable
        if config.tensor_parallel is None:
            widths = [1 << i for i in range(17) if config.gpus % (1 << i) == 0]
            fits = [ranks for ranks in widths if 1.5 * weights <= ranks * room]
            fleet = replace(fleet, ranks=(fits or widths[-1:])[0])
        if fleet.largest < 1:
            raise UserError(
                f"--gpus={config.gpus} is not possible: {name} takes {weights / GIGABYTE:,.0f} GB with its drafter, "
                f"and an engine of {fleet.ranks} {config.gpu} has {fleet.ranks * room / GIGABYTE:,.0f} GB"
            )
        return fleet

    @property
    def drafter(self) -> Drafter:
        """Return the kind of drafter."""
        return DRAFTERS[self.config.drafter]

    # ---- memory

    @property
    def draft_parameters(self) -> tuple[float, float]:
        """Return the parameters of the drafter's layer, and those of the output matrix that it uses."""
        if not self.drafter.layers:
            return 0.0, 0.0
        if self.drafter.own_output:
            dense = replace(self.model, experts=0, intermediate=max(self.model.intermediate, self.model.hidden))
            return dense.head, self.config.draft_vocabulary * self.model.hidden
        return self.model.head, self.model.output

    @cached_property
    def weight_bytes(self) -> float:
        """Return the bytes of the target and of the drafter's own weights."""
        layer, output = self.draft_parameters
        own = layer + output * self.drafter.own_output
        if self.drafter.layers and not self.drafter.own_output:  # a layer with all of its experts, if any
            own += (self.model.experts - self.model.active_experts) * self.model.expert
        return BYTES[self.config.dtype] * self.model.parameters + BF16 * own

    @cached_property
    def row_bytes(self) -> float:
        """Return the average cache bytes of one running row, the drafter's layer included."""
        layers = self.model.growing + self.drafter.layers
        return layers * self.model.kv_bytes * self.context

    @property
    def cache_bytes(self) -> float:
        """Return the bytes of an engine that remain for the cache."""
        return self.ranks * self.gpu.memory * self.gpu.usable - self.weight_bytes

    @cached_property
    def largest(self) -> int:
        """Return the maximum number of rows whose caches fit an engine."""
        return max(0, int(self.cache_bytes / self.row_bytes))

    @property
    def engines(self) -> int:
        """Return the number of engines."""
        return self.config.gpus // self.ranks

    # ---- lengths

    def lengths(self, count: int) -> list[float]:
        """Return ``count`` quantiles of the log-normal length, cut at ``longest``, shortest first."""
        c, normal = self.config, NormalDist()
        logs = [c.tail * normal.inv_cdf((i + 0.5) / count) for i in range(count)]
        return [min(float(c.longest), c.length * math.exp(log)) for log in logs]

    @cached_property
    def context(self) -> float:
        """Return the mean number of tokens in a running row's context, in which long completions weigh more."""
        drawn = self.lengths(512)
        return self.config.prompt + sum(n * n for n in drawn) / sum(drawn) / 2

    # ---- acceptance

    @cached_property
    def rates(self) -> tuple[float, ...]:
        """Return the chance of each draft once those before it were accepted; the last one holds for all later ones."""
        c = self.config
        if c.accept_length is None:
            return c.accept
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            longer = _committed((middle,), c.draft_tokens) > c.accept_length
            low, high = (low, middle) if longer else (middle, high)
        return (high,)

    def accept_length(self, drafts: int) -> float:
        """Return the tokens that a cycle of K ``drafts`` commits."""
        return _committed(self.rates, drafts)

    # ---- seconds

    def target(self, rows: int, positions: int, context: float | None = None) -> float:
        """Return the seconds of a pass of the target over ``positions`` positions of each row.

        ``step_ms`` fits the passes to a measured step. If it is slower than the roofline, the difference is added to
        each pass.
        If it is faster, all passes shrink by that ratio.
        """
        predicted = self._pass(rows, positions, context)
        if self.config.step_ms is None:
            return predicted
        step, known = self.config.step_ms / 1e3, self._pass(self.config.step_rows, 1, None)
        return predicted + step - known if step >= known else predicted * step / known

    def _pass(self, rows: int, positions: int, context: float | None) -> float:
        context = self.context if context is None else context
        read = BYTES[self.config.dtype] * self.model.read(rows * positions)
        return self.gpu.launch + pass_seconds(
            self.gpu, self.model, self.ranks, rows=rows, positions=positions, context=context,
            layers=self.model.growing, multiplied=self.model.multiplied, read_bytes=read,
        )  # fmt: skip

    def draft(self, rows: int, context: float | None = None) -> float:
        """Return the seconds of one step of the drafter."""
        if not self.drafter.layers:
            return 0.0
        weights = sum(self.draft_parameters)
        return self.gpu.draft_launch + pass_seconds(
            self.gpu, self.model, self.ranks, rows=rows, positions=1, layers=1, multiplied=weights,
            context=self.context if context is None else context, read_bytes=BF16 * weights,
        )  # fmt: skip

    def cycle(self, rows: int, drafts: int, context: float | None = None) -> float:
        """Return the seconds of a cycle with K ``drafts``; for a tree, each depth is one step of the drafter."""
        if not drafts:
            return self.target(rows, 1, context)
        verified = round((self.config.verify or self.config.draft_tokens) * drafts / self.config.draft_tokens)
        return self.target(rows, verified + 1, context) + drafts * self.draft(rows, context)

    def speedup(self, rows: int, drafts: int, context: float | None = None) -> float:
        """Return the tokens a second of ``rows`` rows with drafts, relative to those without."""
        return self.accept_length(drafts) * self.cycle(rows, 0, context) / self.cycle(rows, drafts, context)

    def pays_at(self, drafts: int) -> tuple[int, int] | None:
        """Return the fewest and the most rows at which K ``drafts`` make decoding faster; None if no row count that
        fits does.

        The row counts form one range: drafts stop paying once products bound a pass. With experts they may start late,
        as few rows touch few experts and drafts touch more of them.
        """
        grid = _grid(self.largest)
        good = [rows for rows in grid if self.speedup(rows, drafts) > 1]
        if not good:
            return None
        before, after = [n for n in grid if n < good[0]], [n for n in grid if n > good[-1]]
        first = self._edge(good[0], before[-1], drafts) if before else good[0]
        return first, self._edge(good[-1], after[0], drafts) if after else good[-1]

    def _edge(self, good: int, bad: int, drafts: int) -> int:
        """Return the last row count that pays between ``good``, which pays, and ``bad``, which does not."""
        while abs(bad - good) > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if self.speedup(middle, drafts) > 1 else (good, middle)
        return good

    def break_even(self, drafts: int) -> int | None:
        """Return the row count from which K ``drafts`` slow decoding down; None if no row count that fits does."""
        stretch = self.pays_at(drafts)
        if stretch is None:
            return 1
        return None if stretch[1] == self.largest else stretch[1] + 1

    def best(self, rows: int, context: float | None = None) -> int:
        """Return the K that decodes ``rows`` rows fastest, 0 for no drafts."""
        most = max(MOST_DRAFTS, self.config.draft_tokens)
        return max(range(most + 1), key=lambda drafts: self.speedup(rows, drafts, context))

    # ---- a rollout

    @cached_property
    def step_rows(self) -> int:
        """Return the number of completions that one engine decodes in a step."""
        if self.config.completions is None:
            return min(self.largest, ENGINE_ROWS)
        return -(-self.config.completions // self.engines)

    @cached_property
    def segments(self) -> list[tuple[int, float, float]]:
        """Return the parts of a rollout as (rows, tokens decoded by each row, mean context), first to last."""
        slots, waiting = min(self.step_rows, self.largest), self.lengths(self.step_rows)
        random.Random(0).shuffle(waiting)
        queued = len(waiting) > slots  # if so, rows have all ages, and the mean context holds throughout
        running, waiting = waiting[:slots], waiting[slots:][::-1]
        heapq.heapify(running)
        found: list[tuple[int, float, float]] = []
        now = 0.0
        while running:
            end = heapq.heappop(running)
            if end > now:
                rows, tokens = len(running) + 1, end - now
                found.append((rows, tokens, self.context if queued else self.config.prompt + (now + end) / 2))
                now = end
            if waiting:
                heapq.heappush(running, end + waiting.pop())
        return _merged(found)

    def rollout(self, drafts: int | None) -> float:
        """Return the speed-up of a whole rollout with K ``drafts``; None means the best K at each number of rows."""
        plain = with_drafts = 0.0
        for rows, tokens, context in self.segments:
            chosen = self.best(rows, context) if drafts is None else drafts
            plain += tokens * self.cycle(rows, 0, context)
            with_drafts += tokens / self.accept_length(chosen) * self.cycle(rows, chosen, context)
        return plain / with_drafts

    def step(self, speedup: float) -> float:
        """Return the speed-up of an RL step whose decoding is ``speedup`` times faster, by Amdahl's law."""
        share = self.config.rollout_share
        return 1 / (1 - share + share / speedup)


def _committed(rates: Sequence[float], drafts: int) -> float:
    """Return the tokens of a cycle with K ``drafts``; the last rate holds for all later drafts."""
    chances = [rates[min(k, len(rates) - 1)] for k in range(drafts)]
    return 1 + sum(accumulate(chances, mul))


def _grid(largest: int) -> list[int]:
    """Return the row counts of the table: powers of two, and the largest that fits."""
    return sorted({1 << i for i in range(largest.bit_length())} | {largest})


def _merged(parts: Sequence[tuple[int, float, float]]) -> list[tuple[int, float, float]]:
    """Merge neighbouring parts with the same number of rows."""
    found: list[tuple[int, float, float]] = []
    for rows, tokens, context in parts:
        if found and found[-1][0] == rows:
            _, before, mean = found.pop()
            context = (mean * before + context * tokens) / (before + tokens)
            tokens += before
        found.append((rows, tokens, context))
    return found


# ---- the answer


def answer(fleet: Fleet) -> dict[str, Any]:
    """Return all results of the page as a dictionary, for programs."""
    c, gpu, model = fleet.config, fleet.gpu, fleet.model
    columns = sorted({*range(1, MOST_DRAFTS + 1), c.draft_tokens})
    rollout, best = fleet.rollout(c.draft_tokens), fleet.rollout(None)
    layer, output = fleet.draft_parameters
    return {
        "predicted": True,
        "card": {
            "name": c.gpu,
            "source": measured(c.gpu).source,
            "tflops": gpu.flops / 1e12,
            "tb_per_s": gpu.bandwidth / 1e12,
            "memory_gb": gpu.memory / GIGABYTE,
            "share_of_flops": gpu.products,
            "share_of_bandwidth": gpu.traffic,
            "launch_ms": 1e3 * gpu.launch,
            "draft_launch_ms": 1e3 * gpu.draft_launch,
        },
        "model": {
            "name": fleet.name,
            "layers": model.layers,
            "hidden": model.hidden,
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "parameters": model.parameters,
            "active_parameters": model.multiplied + model.output * (not model.tied),
            "dtype": c.dtype,
        },
        "engines": fleet.engines,
        "gpus_per_engine": fleet.ranks,
        "weights_gb": fleet.weight_bytes / GIGABYTE,
        "cache_gb": fleet.cache_bytes / GIGABYTE,
        "context": fleet.context,
        "largest_batch": fleet.largest,
        "drafter": {
            "name": c.drafter,
            "parameters": layer + output,
            "step_ms": 1e3 * fleet.draft(1),
            "plain_step_ms": 1e3 * fleet.target(1, 1),
        },
        "accept_length": {str(k): fleet.accept_length(k) for k in columns},
        "speedup": [
            {"rows": rows, **{str(k): fleet.speedup(rows, k) for k in columns}, "best": fleet.best(rows)}
            for rows in _grid(fleet.largest)
        ],
        "pays_at": {str(k): fleet.pays_at(k) for k in columns},
        "break_even": {str(k): fleet.break_even(k) for k in columns},
        "rollout": {
            "rows": fleet.step_rows,
            "draft_tokens": c.draft_tokens,
            "speedup": rollout,
            "speedup_of_best": best,
            "step_speedup": fleet.step(rollout),
            "step_speedup_of_best": fleet.step(best),
        },
        "advice": advice(fleet, rollout, best),
    }


def advice(fleet: Fleet, rollout: float, best: float) -> str:
    """Return advice in two or three sentences."""
    k = fleet.config.draft_tokens
    stretch = fleet.pays_at(k)
    where = "at no batch that fits" if stretch is None else f"at {stretch[0]} to {stretch[1]} rows an engine"
    if stretch == (1, fleet.largest):
        where = "at every batch that fits"
    if best < 1 + CLOSE:
        return f"Do not draft: at {fleet.accept_length(k):.2f} tokens a cycle no K makes this rollout much faster."
    if rollout < 1 - CLOSE:
        said = f"Do not draft with K = {k}: this rollout becomes slower. K = {k} pays {where}."
    elif rollout < 1 + CLOSE:
        said = f"K = {k} is too close to call for this rollout: measure it. It pays {where}."
    else:
        said = f"Draft with K = {k}: it pays {where}."
    if best > rollout * (1 + CLOSE):
        said += " A K that follows the number of rows, as in the last column, gains clearly more."
    return said + fleet.drafter.remark


def page(found: dict[str, Any], config: PaysConfig) -> str:
    """Return an answer as text for a terminal."""
    card, model, drafter = found["card"], found["model"], found["drafter"]
    columns = list(found["accept_length"])
    size = f"{model['parameters'] / 1e9:.3g} B parameters"
    if model["active_parameters"] < 0.95 * model["parameters"]:
        size += f", {model['active_parameters'] / 1e9:.2g} B of them active"
    rows = {
        "card": f"{card['name']}: {card['tflops']:,.0f} TFLOP/s bf16, {card['tb_per_s']:.3g} TB/s, "
        f"{card['memory_gb']:.0f} GB",
        "counted": f"{card['share_of_flops']:.0%} and {card['share_of_bandwidth']:.0%} of them, "
        f"and {card['launch_ms']:.2g} ms of launching a pass, {card['draft_launch_ms']:.2g} ms a draft",
        "source": card["source"],
        "model": f"{model['name']}: {model['layers']} layers, hidden {model['hidden']}, {model['heads']} heads, "
        f"{model['kv_heads']} of keys and values, {size}, {model['dtype']}",
        "engines": f"{found['engines']} of {found['gpus_per_engine']} GPU{'s' * (found['gpus_per_engine'] > 1)} each",
        "memory": f"{found['weights_gb']:,.3g} GB of weights, {found['cache_gb']:,.3g} GB left for the cache: "
        f"{found['largest_batch']} rows of {found['context']:,.0f} tokens on average",
        "drafter": f"{drafter['name']}: {drafter['parameters'] / 1e9:.2g} B parameters, {drafter['step_ms']:.2g} ms a "
        f"draft beside {drafter['plain_step_ms']:.2g} ms a plain step, at batch 1",
    }
    if config.step_ms is not None:
        rows["measured"] = (
            f"{config.step_ms:g} ms a plain step at {config.step_rows} rows, which all passes are fitted to"
        )
    lines = [*wrap(MARK, WIDTH), ""]
    for name, value in rows.items():
        lines += wrap(value, WIDTH, initial_indent=f"  {name:9} ", subsequent_indent=" " * 12)
    lines += ["", "Tokens a second with K drafts over those without, by the rows that an engine decodes at once:", ""]
    lines.append(f"  {'rows':>8} " + "".join(f"{'K=' + k:>9}" for k in columns) + f"{'best':>8}")
    for one in found["speedup"]:
        best = f"K={one['best']}" if one["best"] else "none"
        lines.append(f"  {one['rows']:>8} " + "".join(f"{one[k]:9.2f}" for k in columns) + f"{best:>8}")
    shown = ["never" if rows is None else f"{rows[0]}-{rows[1]}" for rows in found["pays_at"].values()]
    lines.append(f"  {'pays at':>8} " + "".join(f"{text:>9}" for text in shown) + "  rows")
    lengths = (f"{length:9.2f}" for length in found["accept_length"].values())
    lines.append(f"  {'tokens':>8} " + "".join(lengths) + "  of a cycle")
    rollout = found["rollout"]
    alike = "all as long" if not config.tail else f"log-normal with sigma {config.tail:g}"
    lines += [
        "",
        f"A rollout of {rollout['rows']} completions an engine, median {config.length:,} tokens, {alike}, "
        f"{config.longest:,} at most:",
        f"  K = {rollout['draft_tokens']}: {rollout['speedup']:.2f} times as fast; an RL step that decodes "
        f"{config.rollout_share:.0%} of its time: {rollout['step_speedup']:.2f} times",
        f"  the best K for the rows that are left: {rollout['speedup_of_best']:.2f} and "
        f"{rollout['step_speedup_of_best']:.2f} times",
        "",
        *wrap(found["advice"], WIDTH),
    ]
    return "\n".join(lines) + "\n"
