"""The metrics of trajectories with environments: name, meaning, unit, and what it takes (see ``bebop.catalogue``)."""

ENDED = {
    "done": "their environment ended",
    "length": "end with an answer that was cut off by `max_new_tokens`",
    "turns": "spent `task.environment.max_turns`",
    "tokens": "spent `rollout.max_length`",
    "seconds": "spent `task.environment.max_seconds`",
}
RATES = {
    "accept_rate": "share of accepted drafts at position K, among cycles that reached it,",
    "overlap": "mean Σ min(p, q) at position K",
}
KINDS = (
    ("N", "in turns N to 2N - 1 (0: the first; 1: the second)", ""),
    ("after", "in the first cycle after each observation", "an engine that tells it apart"),
)

TURNS: tuple[tuple[str, str, str, str], ...] = (
    ("turn/count", "mean number of turns of a trajectory", "turns", ""),
    ("turn/count_p50", "half of the trajectories have as many turns or fewer", "turns", ""),
    ("turn/count_p99", "99 % of them have", "turns", ""),
    ("turn/seconds_p50", "half of the trajectories spent as long in their environments or less", "s", ""),
    ("turn/seconds_p99", "99 % of them did", "s", ""),
    ("turn/observed", "mean tokens a trajectory that were read and not written", "tokens", ""),
    ("turn/restarts", "times that one of them began again, as its environment was lost", "times", ""),
    ("turn/lost", "trajectories given up, as their environments were lost too often", "trajectories", ""),
    *((f"turn/ended/{ending}", f"share of trajectories that {how}", "share", "") for ending, how in ENDED.items()),
    ("turn/counts/NAME", "mean of what the environment counts under a name of its own", "", "such counts"),
    *(
        (f"turn/{name}/{kind}/K", f"{meaning} {which}", "share", rare)
        for name, meaning in RATES.items()
        for kind, which, rare in KINDS
    ),
)
