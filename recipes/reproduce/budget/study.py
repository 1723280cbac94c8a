"""Full adaptations by four losses, with two amounts of data and three seeds; README.md says what counts."""

from dataclasses import asdict

from recipes.reproduce.claims import BUILT_IN
from recipes.reproduce.harness import Figure, Study, rows
from recipes.reproduce.objectives.study import (
    COLUMNS,
    FEW,
    GREEDY,
    LENGTH,
    PREPARE,
    STILL,
    decoded_rows,
    draw_lengths,
    measure,
    trained,
)
from recipes.reproduce.rules import Declared, gain, half_of, less, unmoved
from recipes.reproduce.study import QUICK, SEQUENCES, Arm

LOSSES = ("hard_ce", "ce", "nla", "e2e_tv")
DATA = {"": SEQUENCES, ", few": FEW}
STEPS = 4 if QUICK else 200
BAR = 0.2  # tokens, the project's own bar
COUNTS = {"": 800, ", few": 100}  # completions that heads learn on, in a full run


def over(base: str, data: str, says: str, by: float = 0.0, also: str = "") -> Declared:
    """Return a rule: end-to-end TV beats another loss, with one amount of data.

    ``also``: an arm; the gain of end-to-end TV over it is quoted as further evidence.
    """
    told = {f"over {also.partition(',')[0]}": LENGTH.gain(f"e2e_tv{data}", also)} if also else {}
    says = f"A full adaptation by end-to-end TV beats as much {says}, {COUNTS[data]} answers."
    return gain("C3", LENGTH, f"e2e_tv{data}", over=f"{base}{data}", by=by, says=says, also=told)


RULES = (
    *(over("hard_ce", d, "hard-label cross-entropy by 0.2 tokens", BAR, "" if d else "start") for d in DATA),
    *(over("ce", data, "soft-label cross-entropy", also=f"nla{data}") for data in DATA),
    unmoved(
        "C3", GREEDY, "e2e_tv", over="hard_ce", within=STILL,
        says="After a full adaptation greedy drafts have neither gained nor lost over hard labels.",
        also={"sampled drafts": LENGTH.gain("e2e_tv", "hard_ce")},
    ),
)  # fmt: skip
STUDY = Study(
    name="budget",
    paper="the project's own bar, on Table 2 of arXiv 2606.12370",
    model=BUILT_IN,
    arms={"start": (None, True)}
    | {f"{loss}{data}": trained(loss, steps=STEPS, sequences=n) for data, n in DATA.items() for loss in LOSSES},
    measure=measure,
    prepare=PREPARE,
    stats=(
        *(stat(f"{loss}{data}") for data in DATA for loss in LOSSES for stat in (LENGTH, GREEDY)),
        *(LENGTH.gain(f"e2e_tv{data}", f"{base}{data}") for data in DATA for base in LOSSES[:-1]),
        less(
            "half the gain - greedy gain",
            half_of(LENGTH.gain("e2e_tv", "hard_ce")),
            GREEDY.gain("e2e_tv", "hard_ce"),
        ),
    ),
    rules=RULES,
    tables=lambda results: {
        "Objectives": rows(results, COLUMNS, head="objective"),
        "Decoded": decoded_rows(results),
    },
    figures=(
        Figure(
            file="budget.svg",
            caption=f"Accept length after {STEPS} steps with {SEQUENCES} answers and with {FEW} (few); sampled drafts "
            "(left), greedy drafts (right); mean of three seeds and its 95 % interval.",
            draw=draw_lengths,
        ),
    ),
    settings={**asdict(Arm(objective="", seed=0, steps=STEPS)), "few": FEW},
)
