"""Gain of chosen draft temperatures: ``auto`` against every fixed one, for heads of all training objectives.

Completions of the target are given, and decoding walks over them again. Given the token y that was emitted, a draft was
accepted with probability min(1, q(y) / p(y)) (SPEC 0.6), whatever was drafted. So every arm walks over the same text
with the same random numbers, and arms differ by far less than two decodings would. The auto arm learns within each
completion by the engine's own rule, and uses nothing else.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from bebop.bench.record import noted
from bebop.config.fields import check
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.decoding.temperature import GRID, Overlaps, measured
from bebop.trainer.chains import TokenRow

FIXED = (0.25, 0.32, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2)  # times the target's temperature
WALKS = 16  # over each answer

# The rule, older than the run: for every head, auto has this share of what the best fixed temperature, chosen in
# hindsight on the same answers, gains over the target's own; of gains this small (tokens a cycle) it may miss all.
SHARE, SMALL = 0.9, 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Acceptance and overlap in N completions, where a cycle may begin at each of T tokens with up to K drafts."""

    survive: Tensor  # [N, T, K, D] probability that a draft was accepted, given the token that came out
    overlap: Tensor  # [N, T, K, D] of target and draft
    lengths: Tensor  # [N] tokens of each answer


def table(model: Policy, rows: Sequence[TokenRow], depth: int, temperatures: Sequence[float]) -> Table:
    """Run both models on text, for drafts of each temperature; the target's temperature is 1."""
    from recipes.reproduce.beyond.on_text import TextSampling, pairs, states

    survive: list[Tensor] = []
    overlap: list[Tensor] = []
    batch = 48
    longest = max(len(row.answer) for row in rows)
    for start in range(0, len(rows), batch):
        with torch.no_grad():
            steps = states(model, rows[start : start + batch], depth)
            chosen = steps.mask.any(-1)  # [B, A], the first anchor before the first token of the answer
            mask = steps.mask[chosen]
            for kept, values in zip(
                (survive, overlap),
                pairs(steps, chosen, mask, [TextSampling(t) for t in temperatures], TextSampling()),
                strict=True,
            ):
                spread = torch.zeros(len(chosen), longest, depth, len(temperatures))
                spread[:, : chosen.shape[1], : mask.shape[1]][chosen[:, :longest]] = values.permute(1, 2, 0)
                kept.append(spread)
    lengths = torch.tensor([len(row.answer) for row in rows])
    return Table(survive=torch.cat(survive), overlap=torch.cat(overlap), lengths=lengths)


def walk(known: Table, temperature: int | None, grid: slice, walks: int = WALKS, seed: int = 0) -> float:
    """Return the tokens per cycle over all completions, with drafts at one temperature of the table.

    ``temperature`` None: ``Overlaps`` chooses it. ``grid``: the places of ``GRID``'s temperatures in the table.
    """
    survive, overlap = (x.repeat(walks, 1, 1, 1) for x in (known.survive, known.overlap))
    lengths = known.lengths.repeat(walks)
    count, longest, depth, _ = survive.shape
    uniforms = torch.rand(count, longest, depth, generator=torch.Generator().manual_seed(seed))
    every, steps = torch.arange(count), torch.arange(depth)
    known_turns = [measured(cycle, depth) for cycle in range(longest + 1)]
    turns = torch.tensor([-1 if turn is None else turn for turn in known_turns])  # the position measured in each cycle
    kept = Overlaps.fresh(depth).repeat(count, 1, 1)
    place, cycles = torch.zeros_like(lengths), torch.zeros_like(lengths)
    while (alive := place < lengths).any():
        at = place.clamp_max(longest - 1)
        if temperature is None:
            index = Overlaps(kept).best() + grid.start
        else:
            index = torch.full((count, depth), temperature)
        chance = survive[every, at].gather(-1, index[..., None])[..., 0]
        accepted = (uniforms[every, at] < chance).long().cumprod(1).sum(1)
        emitted = torch.minimum(accepted + 1, lengths - place)
        tested = (steps < emitted[:, None]) & (steps == turns[cycles][:, None]) & alive[:, None]
        kept = Overlaps(kept).after(overlap[every, at][..., grid], tested)
        place, cycles = torch.where(alive, place + emitted, place), cycles + alive
    return float(lengths.sum() / cycles.sum())


def arms(model: Policy, rows: Sequence[TokenRow], depth: int) -> dict[str, float]:
    """Return the accept length of every fixed temperature, and of auto."""
    known = table(model, rows, depth, [*FIXED, *GRID])
    grid = slice(len(FIXED), len(FIXED) + len(GRID))
    found = {str(t): walk(known, i, grid) for i, t in enumerate(FIXED)}
    return found | {"auto": walk(known, None, grid)}


def judged(head: str, found: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return a row with means over seeds, and whether the rule holds."""
    mean = {arm: sum(one[arm] for one in found) / len(found) for arm in found[0]}
    best = max(FIXED, key=lambda t: mean[str(t)])
    gain, own = mean[str(best)] - mean["1.0"], mean["auto"] - mean["1.0"]
    return {
        "head": head,
        "target's": mean["1.0"],
        "best fixed": best,
        "its length": mean[str(best)],
        "auto": mean["auto"],
        "gain fixed": gain,
        "gain auto": own,
        "share": own / gain if gain > SMALL else None,
        "holds": gain - own <= max((1 - SHARE) * gain, SMALL),
        **{f"at {t}": mean[str(t)] for t in FIXED},
        "autos": [round(one["auto"], 4) for one in found],
    }


def run(heads: Sequence[str], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return a row for each named arm of ``recipes.reproduce.objectives``; without names, for all.

    Heads are trained, or found where a study has kept them (``BEBOP_REPRODUCE``).
    """
    try:
        from recipes.reproduce.objectives.study import STUDY
        from recipes.reproduce.study import DEPTH, HELD_OUT, head, policy, prepare, text
    except ImportError as error:
        raise UserError("bench draft_temperature trains the heads of recipes/, which is in a checkout alone") from error
    labels = list(STUDY.arms)
    for label in heads:
        check(label in labels, "--heads", label, f"choose among {'; '.join(labels)}")
    for seed in seeds:
        check(seed in STUDY.seeds, "--seeds", seed, "that seed has no heads")
        prepare(seed)
    rows = []
    progress = tqdm(total=len(heads or labels) * len(seeds), desc="heads")
    for label in heads or labels:
        found = []
        for seed in seeds:
            trained, _ = STUDY.arms[label]
            model = policy() if trained is None else head(replace(trained, seed=seed))
            found.append(arms(model, text(seed, HELD_OUT), DEPTH))
            noted({"head": label, "seed": seed, **found[-1]})
            progress.update()
        rows.append(judged(label, found))
    progress.close()
    return rows
