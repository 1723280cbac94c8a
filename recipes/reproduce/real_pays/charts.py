"""Figure of the studies of whether drafts pay."""

from pathlib import Path

from recipes.reproduce.figures import errors, figure
from recipes.reproduce.real_pays.analysis import accept_length, break_even, over_rounds
from recipes.reproduce.real_pays.rounds import DRAFTING, LENGTHS, Rounds

SHADES = {"bebop": "#16407a", "target_only": "#d1603d"}


def draw(found: Rounds, folder: Path) -> None:
    """Draw speed-ups above and accept lengths below, one column per batch size."""
    with figure(folder / "pays.svg", len(found), 3.4, 2.8, 2, squeeze=False) as panels:
        for (batch, rounds), above, below in zip(found.items(), *panels, strict=True):
            for system, lengths in DRAFTING.items():
                style = {"capsize": 3, "marker": "o", "color": SHADES[system], "label": system}
                speeds = [over_rounds(rounds, lambda one, arm=(system, k): one.ratio(arm)) for k in lengths]  # type: ignore[misc]
                above.errorbar(lengths, [i.value for i in speeds], errors(speeds), **style)
                there = [accept_length(rounds, (system, k)) for k in lengths]
                below.errorbar(lengths, [i.value for i in there], errors(there), **style)
            needed = [over_rounds(rounds, lambda one, k=k: break_even(one, k)).value for k in LENGTHS]  # type: ignore[misc]
            above.axhline(1, color="#6b7280", linestyle="--", linewidth=1)
            below.plot(LENGTHS, needed, color="#6b7280", linestyle="--", label="break-even")
            above.set(title=f"batch {batch}", xticks=LENGTHS)
            below.set(xlabel="drafts K", xticks=LENGTHS)
        panels[0][0].set(ylabel="speed-up over plain")
        panels[1][0].set(ylabel="accept length")
        panels[1][0].legend(fontsize=8)
