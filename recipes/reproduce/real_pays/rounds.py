"""Timed decoding in rounds: in each, all arms take turns over the same prompts, which no other round has."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bebop.adaptation.corpus import sampling_params
from bebop.config.job import DecodingConfig, SamplingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.rollout.engine import Request
from recipes.reproduce.real.heads import BEST, load_head
from recipes.reproduce.real.plan import HERE, PLAN, load
from recipes.reproduce.real.prompts import make_prompts
from recipes.reproduce.real.runs import SHARED
from recipes.reproduce.real_pays.findings import BATCHES
from recipes.reproduce.study import QUICK
from recipes.reproduce.throughput.timing import Costs, Timed, costs, timed

Arm = tuple[str, int]  # system, K
PLAIN: Arm = ("autoregressive", 0)
LENGTHS = (1, 2, 3)  # K of sampled drafts
DRAFTING = {"bebop": LENGTHS, "target_only": (1, 2)}
ARMS: tuple[Arm, ...] = (PLAIN, *((system, k) for system, lengths in DRAFTING.items() for k in lengths))
ROUNDS = 2 if QUICK else 5
ANSWERS = dict.fromkeys(BATCHES, 2) if QUICK else {1: 1, 8: 8, 32: 32}  # completions per round, by batch size
GROUP = 4  # completions per prompt in a batch, as in training
NEW_TOKENS = 8 if QUICK else 64  # maximum per completion
WARM_TOKENS = 4  # of a completion that is not timed
SPAN = 128  # tokens of context after which a GPU's attention over pages is another kernel
LONG_ENOUGH = 64  # tokens, where single passes are timed
REPEATS = 2 if QUICK else 3  # passes of each kind in a round, of which the median counts
HEAD = HERE / "heads" / SHARED / BEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Timings and pass costs of one round at one batch size."""

    timed: dict[Arm, Timed]
    costs: Costs

    def ratio(self, arm: Arm, base: Arm = PLAIN) -> float:
        """Return the tokens per second, by processor time or GPU clock, over those of another arm."""
        return self.timed[arm].speed / self.timed[base].speed


Rounds = dict[int, list[Round]]  # by batch size


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Amount of measurement: rounds, completions per round and repeated passes."""

    rounds: int
    answers: Mapping[int, int]  # completions per round, by batch size
    repeats: int  # passes of each kind in a round
    seconds: float = math.inf  # after which no further round begins, once there are two

    @property
    def runs(self) -> int:
        """Return the number of progress reports of ``measure``."""
        return self.rounds * len(self.answers) * (len(ARMS) + 1)


def policy() -> Policy:
    """Load the model with the shared head; a smoke run loads the built-in model with its own head.

    Raises:
        UserError: The head is not trained yet.
    """
    if QUICK:
        return load(PLAN)
    if not HEAD.is_file():
        raise UserError(
            f"{HEAD} is not there: run first python -m recipes.reproduce.real --stage corpus states heads "
            f"--heads {SHARED}"
        )
    model = load(PLAN, init_mtp=True)
    load_head(model, HEAD, SHARED)
    return model


def held_out_prompts(model: Policy) -> list[tuple[int, ...]]:
    """Return the prompts of the test split, kinds mixed: no head was trained on them."""
    return [prompt.token_ids for prompt in make_prompts(PLAN, model) if prompt.split == "test"]


def requests(model: Policy, prompts: Sequence[tuple[int, ...]], count: int, turn: int) -> list[Request]:
    """Return ``count`` requests, in groups, to prompts that no other turn has.

    Prompts repeat once all are used. The turn chooses the random numbers.
    """
    sampling, group = SamplingConfig(max_new_tokens=NEW_TOKENS), min(GROUP, count)
    first, start = (1 + turn) << 20, turn * -(-count // group)
    chosen = [prompts[(start + i // group) % len(prompts)] for i in range(count)]
    return [
        Request(id=i, token_ids=ids, params=sampling_params(model, sampling, first + i)) for i, ids in enumerate(chosen)
    ]


def endless(wanted: Sequence[Request]) -> list[Request]:
    """Return the requests without stop tokens.

    Single passes are thus timed in the middle of completions, however short these would be.
    """
    return [replace(one, params=replace(one.params, stop_token_ids=(), max_new_tokens=LONG_ENOUGH)) for one in wanted]


def brief(wanted: Sequence[Request]) -> list[Request]:
    """Return the requests with a few tokens each: a run that compiles the kernels of an arm and a batch size."""
    return [replace(one, params=replace(one.params, max_new_tokens=WARM_TOKENS)) for one in wanted]


def repeated(wanted: Sequence[Request], entries: int) -> list[Request]:
    """Return the requests with prompts repeated to ``entries`` tokens; 0: as they are."""
    return [replace(one, token_ids=(one.token_ids * entries)[:entries] or one.token_ids) for one in wanted]


def measure(
    model: Policy,
    prompts: Sequence[tuple[int, ...]],
    progress: Callable[[], Any],
    sizes: Sizes,
    keep: Callable[[Rounds], object] = lambda _: None,
) -> Rounds:
    """Time all arms in all rounds at every batch size; each round begins with another arm.

    ``keep`` is given what there is after each round from the second on.
    """
    found: Rounds = {batch: [] for batch in sizes.answers}
    began = time.monotonic()
    most = max(map(len, prompts)) + NEW_TOKENS if model.device.type == "cuda" else 0
    for batch, count in sizes.answers.items():  # the first passes are slow
        for arm in ARMS:
            for entries in (0, *range(SPAN + 1, most + 1, SPAN)):
                run(model, arm, brief(repeated(requests(model, prompts, count, 0), entries)), batch)
    for turn in range(sizes.rounds):
        first = turn * len(ARMS) // sizes.rounds
        for batch, count in sizes.answers.items():
            if turn >= 2 and time.monotonic() - began > sizes.seconds:
                return found
            wanted = requests(model, prompts, count, turn)
            spent = {}
            for arm in (*ARMS[first:], *ARMS[:first]):
                spent[arm] = run(model, arm, wanted, batch)
                progress()
            found[batch].append(Round(timed=spent, costs=costs(model, endless(wanted), batch, LENGTHS, sizes.repeats)))
            progress()
        if turn:
            keep(found)
    return found


def run(model: Policy, arm: Arm, wanted: Sequence[Request], batch: int) -> Timed:
    """Time one arm in one round."""
    return timed(model, DecodingConfig(system=arm[0], draft_tokens=arm[1]), wanted, batch)
