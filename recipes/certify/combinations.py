"""Exactness with many features on at once: certificates of an engine for every pair of feature levels.

Each feature that can disturb a request is a factor: weights that change in flight, aborts, a second turn, scarce pages,
truncation, penalties. A pairwise covering array holds every pair of levels of two factors in some row. Each row is a
certificate of the built-in model with those levels. A row counts only if the features that it switches on also took
effect. It passes if every fault that was tested for moves less than ``LIMIT`` of the probability of a token.

    python -m recipes.certify.combinations --out runs/combinations      # hours; rows in that folder are not run again
    python -m recipes.certify.combinations --out runs/combinations --engine vllm    # in its environment; or sglang

New weights are the model's own with noise. The reference knows both and tests every token against the weights of its
version, so the engine has to compute contexts again after an update (``on_update=recompute``).
"""

import argparse
import itertools
import json
import random
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from bebop.certify.answers import Answer, Block
from bebop.certify.certificate import Certificate
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.model_reference import ModelReference
from bebop.certify.reference import Progress
from bebop.certify.run import Plan, Run, Setting
from bebop.certify.white_box import WhiteBox
from bebop.config.compose import job_config
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy, stop_tokens
from bebop.rollout.engine import Finished, Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.run_dir.checkpoints import write_text
from bebop.runtime.preflight import prompts
from bebop.systems import SYSTEMS
from bebop.trajectory import SamplingParams

LIMIT = 0.01  # total variation a token
TOKENS = 40_000  # of a row
ALPHA = 1e-5  # of a row: over a hundred rows a false alarm has a chance of 1 in 1,000
COHORT, ANSWER, LENGTH = 16, 40, 160  # requests side by side; tokens of a completion; of prompts and completions
FOLDER = Path(__file__).parent
Row = dict[str, str]

FACTORS: Mapping[str, tuple[str, ...]] = {
    "system": tuple(name for name, one in SYSTEMS.items() if one.exact),
    "drafts": ("fixed", "changed", "auto"),
    "weights": ("fixed", "in flight"),
    "requests": ("whole", "resumed", "in a new engine"),
    "turns": ("one", "two"),
    "arrivals": ("together", "one by one"),
    "past": ("forgotten", "remembered"),
    "truncation": ("none", "top-p", "top-k and min-p"),
    "penalty": ("none", "1.2"),
    "temperature": ("1", "1.6"),
    "cache": ("slots", "few pages"),
    "overlap": ("off", "on"),
}
"""Name -> levels; the first one is the usual state."""

SERVED: Mapping[str, tuple[str, ...]] = {
    **FACTORS,
    "system": ("autoregressive", "bebop", "target_only"),
    "drafts": ("fixed",),
    "requests": ("whole", "resumed"),
    "past": ("forgotten",),
    "truncation": ("none", "top-p", "top-k"),
    "cache": ("slots",),
    "overlap": ("off",),
}
"""What vLLM and SGLang can do of it: their caches and schedulers are as they are."""
SGLANG: Mapping[str, tuple[str, ...]] = {**SERVED, "penalty": ("none",)}  # it is refused there
# SGLang would fill the machine's memory with its cache, and leaves truncation out of its log-probs.
OWN = {"sglang": ("rollout.sglang.cache_tokens=8192", "algorithm.rescore=true")}
PACE = {"sglang": 5}  # a cycle of a server lasts a fifth of a second, in which SGLang decodes little on a CPU
ENGINES = {"embedded": FACTORS, "vllm": SERVED, "sglang": SGLANG}

TRUNCATION: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "top-p": {"top_p": 0.9},
    "top-k": {"top_k": 12},
    "top-k and min-p": {"top_k": 12, "min_p": 0.02},
}


# ---- which combinations there are


def possible(row: Mapping[str, str]) -> bool:
    """Return whether the levels chosen so far are compatible."""
    system = SYSTEMS[row["system"]] if "system" in row else None
    drafts = row.get("drafts", "fixed")
    if system is None or drafts == "fixed":
        return True
    # A tree and a block have as many drafts as their shape, or their part, says.
    if drafts == "changed":
        return bool(system.drafts) and not system.tree and not system.needs and not system.separate
    return bool(system.supports_auto_length)


def pairs(row: Mapping[str, str]) -> Iterator[frozenset[tuple[str, str]]]:
    """Yield the pairs of levels of a row, complete or not."""
    return (frozenset(pair) for pair in itertools.combinations(row.items(), 2))


def covering(
    factors: Mapping[str, Sequence[str]], fits: Callable[[Mapping[str, str]], bool], seed: int = 0
) -> list[Row]:
    """Return rows that hold every possible pair of levels of two factors, each row the best of several tries (AETG).

    The same arguments give the same rows.
    """
    rng, rows = random.Random(seed), []
    every = [dict(two) for a, b in itertools.combinations(factors, 2)
             for two in itertools.product(((a, x) for x in factors[a]), ((b, y) for y in factors[b]))]  # fmt: skip
    left = {frozenset(two.items()): None for two in every if fits(two)}  # in a fixed order
    while left:
        found = [_filled(dict(sorted(next(iter(left)))), factors, fits, left, rng) for _ in range(24)]
        best = max(found, key=lambda row: sum(pair in left for pair in pairs(row)))
        rows.append({name: best[name] for name in factors})
        for pair in pairs(best):
            left.pop(pair, None)
    return rows


def _filled(
    row: Row,
    factors: Mapping[str, Sequence[str]],
    fits: Callable[[Mapping[str, str]], bool],
    left: Mapping[frozenset[tuple[str, str]], None],
    rng: random.Random,
) -> Row:
    """Complete a row that has some levels; each new level is chosen to be in as many uncovered pairs as possible."""
    for name in rng.sample([*factors], len(factors)):
        if name not in row:
            levels = [level for level in rng.sample([*factors[name]], len(factors[name])) if fits({**row, name: level})]
            row[name] = max(
                levels, key=lambda level: sum(frozenset(((name, level), one)) in left for one in row.items())
            )
    return row


# ---- an engine to which all of that happens


@dataclass(slots=True, kw_only=True)
class Waiting:
    """Request that is still to be sent, at once or later."""

    request: Request
    turn: int = 1


class BusyEngine(EmbeddedEngine):
    """Embedded engine with weights that change, requests that are aborted and resumed, and several turns."""

    pace = 1  # cycles from one change to the next, as a multiple of what is usual

    def __init__(self, row: Row, policy: Policy, sets: Sequence[Mapping[str, Tensor]], box: WhiteBox | None) -> None:
        """Make the engine.

        ``sets``: version v has the weights at v modulo their number. ``box``: observes every engine that is made.
        """
        self.row, self.policy, self.sets, self.box = row, policy, sets, box
        self.happened: Counter[str] = Counter()  # what was switched on, and how often it came
        self.cycle = 0
        self.past: dict[tuple[int, ...], list[list[int]]] = {}
        super().__init__(self._made(), white_box=box)

    def _made(self) -> TorchEngine:
        """Return a new engine, at version 0."""
        few, one_by_one = self.row["cache"] == "few pages", self.row["arrivals"] == "one by one"
        engine = TorchEngine(
            self.policy,
            decoding_of(self.row),
            slots=5 if one_by_one else COHORT,
            max_length=LENGTH,
            on_update="recompute",
            measure=False,
            room=4,
            paged=few,
            cache_tokens=(2 if one_by_one else 3) * LENGTH if few else None,
            overlap=self.row["overlap"] == "on",
        )
        engine.load_weights(self.sets[0], 0)
        return engine

    def sample(self, requests: Sequence[Request], progress: Progress) -> list[Answer]:
        """Decode a cohort under all disturbances of the row; with two turns, return two completions per request."""
        two = self.row["turns"] == "two"
        queue = deque(Waiting(request=replace(request, park=two)) for request in requests)
        asked: dict[int, Waiting] = {}
        done: dict[int, Finished] = {}
        cycles: dict[int, list[int]] = {}
        self._remember(requests)
        while queue or self.engine.unfinished:
            self._let_in(queue, asked, cycles)
            finished = self.engine.step()
            self.cycle += 1
            progress(self._note(cycles, finished))
            finished += self._disturb(asked, queue, cycles)
            for one in finished:
                done[one.id] = one
                waiting = asked.pop(one.id)
                if two and waiting.turn == 1:
                    queue.append(Waiting(request=self._next_turn(waiting.request, one, len(requests)), turn=2))
        self._keep(requests, done)
        self._count()
        return self._answers(requests, done, cycles)

    def _count(self) -> None:
        """Count preemptions and reused entries since the last count."""
        self.happened["preempted"] += self.engine.preempted
        self.happened["reused entries"] += self.engine.retention.counts.reused
        self.engine.preempted = self.engine.retention.counts.reused = 0

    def _let_in(self, queue: deque[Waiting], asked: dict[int, Waiting], cycles: dict[int, list[int]]) -> None:
        """Add requests to the engine: all at once, or one in every second cycle."""
        few = self.row["arrivals"] == "one by one"
        for _ in range(int(self.cycle % 2 == 0) if few else len(queue)):
            if queue:
                waiting = queue.popleft()
                asked[waiting.request.id] = waiting
                cycles.setdefault(waiting.request.id, [])
                self.engine.add(waiting.request)
                self.happened["arrived beside others"] += few and len(asked) > 1

    def _disturb(
        self, asked: dict[int, Waiting], queue: deque[Waiting], cycles: dict[int, list[int]]
    ) -> list[Finished]:
        """Apply the row's disturbances between two cycles; return requests that ended by themselves in the meantime."""
        ended: list[Finished] = []
        if self.row["drafts"] == "changed" and self.cycle % 5 == 0:
            drafts = 1 + self.cycle // 5 % 4
            self.engine.configure(replace(self.engine.decoding, draft_tokens=drafts))
            self.happened["drafts changed"] += 1
        if self.row["weights"] == "in flight" and self.cycle % (7 * self.pace) == 0:
            number = self.engine.version + 1
            self.happened["weights changed in flight"] += self.engine.unfinished > 0
            self.engine.load_weights(self.sets[number % len(self.sets)], number)
        new = self.row["requests"] == "in a new engine"
        if self.row["requests"] != "whole" and self.cycle % ((33 if new else 11) * self.pace) == 0:
            stopped = self.engine.abort(None if new else [*asked][::2])
            self._note(cycles, stopped)
            for one in stopped:
                if one.completion.finish_reason != "abort":
                    ended.append(one)
                    continue
                waiting = asked.pop(one.id)
                partial = one.completion if len(one.completion.token_ids) else None
                queue.append(replace(waiting, request=replace(waiting.request, partial=partial)))
                self.happened["went on from a partial completion"] += partial is not None
            if new:
                self._move(asked)
        return ended

    def _move(self, asked: Mapping[int, Waiting]) -> None:
        """Continue in a new engine, as a resumed job does; the old engine is empty by then."""
        number = self.engine.version
        assert not self.engine.unfinished
        self._count()
        super().__init__(self._made(), white_box=self.box)
        self.engine.load_weights(self.sets[number % len(self.sets)], number)
        for prompt, answers in self.past.items():
            self.engine.remember(prompt, answers)
        self.happened["new engine"] += 1

    def _next_turn(self, request: Request, ended: Finished, cohort: int) -> Request:
        """Return the request after a turn: its context and tokens, then an observation, here part of a prompt."""
        said = request.token_ids[:7]
        context = (*request.token_ids, *ended.completion.token_ids.tolist(), *said)
        return Request(id=request.id + cohort, token_ids=context, params=request.params)

    def _remember(self, requests: Sequence[Request]) -> None:
        """Give the engine the previous cohort's completions as if of these prompts; poor drafts must not matter."""
        if self.row["past"] == "remembered" and self.past:
            latest = [answers for _, answers in [*self.past.items()][-COHORT:]]
            for request, answers in zip(requests, latest, strict=False):
                self.past[request.token_ids] = answers
                self.engine.remember(request.token_ids, answers)
                self.happened["remembered"] += 1

    def _keep(self, requests: Sequence[Request], done: Mapping[int, Finished]) -> None:
        for request in requests:
            ids = done[request.id].completion.token_ids.tolist()
            self.past.setdefault(request.token_ids, []).append(ids)
        while len(self.past) > 2 * COHORT:
            self.past.pop(next(iter(self.past)))

    def _answers(
        self, requests: Sequence[Request], done: Mapping[int, Finished], cycles: Mapping[int, list[int]]
    ) -> list[Answer]:
        first = [self._answer(request, done[request.id], cycles[request.id]) for request in requests]
        if self.row["turns"] == "one":
            return first
        second = [self._next_turn(request, done[request.id], len(requests)) for request in requests]
        return [*first, *(self._answer(request, done[request.id], cycles[request.id]) for request in second)]


class BusyServer(BusyEngine):
    """vLLM or SGLang in this process, as a job runs it, under the same disturbances."""

    places_known = False

    def __init__(self, name: str, row: Row, folder: Path, sets: Sequence[Mapping[str, Tensor]]) -> None:
        """Start the engine on the model in ``folder``; ``sets``: see ``BusyEngine``. Drafts keep their weights."""
        self.name, self.row, self.sets, self.white_box = name, row, sets, None
        self.pace = PACE.get(name, 1)
        self.happened, self.cycle, self.past = Counter(), 0, {}
        system = SYSTEMS[row["system"]]
        config = job_config(
            [
                f"rollout={name}",
                "model=folder",
                f"model.path={folder}",
                "model.device=cpu",
                f"decoding={row['system']}",
                f"decoding.draft_tokens={2 if system.drafts else 0}",
                "rollout.on_update=recompute",
                f"rollout.slots={5 if row['arrivals'] == 'one by one' else COHORT}",
                f"rollout.max_length={LENGTH}",
                f"rollout.sampling.max_new_tokens={ANSWER}",
                *OWN.get(name, ()),
            ]
        )
        module = import_module(f"bebop.rollout.{name}.builder")
        self.engine, _ = module.make(config)
        self.described = {"engine": name, "version": import_module(name).__version__, "decoding": row["system"]}

    def describe(self) -> dict[str, Any]:
        """Return the engine's name and version."""
        return self.described

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def _count(self) -> None:
        """Do nothing: a server does not report these counts."""

    def _note(self, cycles: dict[int, list[int]], finished: Sequence[Finished]) -> int:
        """Return the tokens of the finished requests; a server does not report the cycle of each token."""
        return sum(len(one.completion.token_ids) for one in finished)


class VersionedReference:
    """``Reference`` that tests every token against the weights of its version."""

    name = "model"

    def __init__(self, references: Sequence[ModelReference]) -> None:
        """Set ``references``; version v has the one at v modulo their number."""
        self.references = references

    def describe(self) -> dict[str, Any]:
        """Return the descriptions of the references."""
        return {str(number): one.describe() for number, one in enumerate(self.references)}

    def block(self, answers: Sequence[Answer], params: SamplingParams) -> Block:
        """Return the distributions at every position, each row under the weights of its token's version."""
        blocks = [one.block(answers, params) for one in self.references]
        given = [one.versions for one in answers if len(one.token_ids)]
        which = torch.cat(
            [torch.zeros(0, dtype=torch.long), *(torch.from_numpy(one) for one in given if one is not None)]
        )
        which = which % len(blocks)
        rows: dict[str, Any] = {}
        for name in ("probs", "logprobs", "before", "raw", "draft"):
            there = [getattr(block, name) for block in blocks]
            if there[0] is not None:
                rows[name] = torch.stack(there)[which, torch.arange(len(which))]
        return replace(blocks[0], **rows)


# ---- a row


def decoding_of(row: Row) -> DecodingConfig:
    """Return the decoding of a row; a separate draft model is the model itself at another temperature."""
    system = SYSTEMS[row["system"]]
    auto, most = row["drafts"] == "auto", min(3, system.width) if system.drafts else 0
    return DecodingConfig(
        system=row["system"],
        draft_tokens="auto" if auto else most,
        most_drafts=most if auto else None,
        draft_temperature=1.3 if system.separate else None,
    )


def params_of(row: Row, model: ModelConfig) -> SamplingParams:
    """Return the sampling parameters that a row claims."""
    return SamplingParams(
        temperature=float(row["temperature"]),
        repetition_penalty=1.0 if row["penalty"] == "none" else float(row["penalty"]),
        max_new_tokens=ANSWER,
        stop_token_ids=stop_tokens(model),
        **TRUNCATION[row["truncation"]],
    )


def expected(row: Row) -> list[str]:
    """Return the names of the events that must have happened for a row to count."""
    wanted = {
        "drafts changed": row["drafts"] == "changed",
        "weights changed in flight": row["weights"] == "in flight",
        "went on from a partial completion": row["requests"] != "whole",
        "new engine": row["requests"] == "in a new engine",
        "arrived beside others": row["arrivals"] == "one by one",
        "remembered": row["past"] == "remembered",
        "preempted": row["cache"] == "few pages" and row["arrivals"] == "together",
    }
    return [name for name, needed in wanted.items() if needed]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one row: its certificate, its events and its duration."""

    certificate: Certificate
    happened: Mapping[str, int]
    seconds: float = field(default=0.0)

    def stored(self, row: Row) -> dict[str, Any]:
        """Return the content for ``combinations.json``."""
        one = self.certificate
        return {
            "row": row,
            "verdict": one.verdict,
            "tokens": one.tokens,
            "tv_bound": one.bound,
            "ln_e": round(one.log_e, 3),
            "cause": None if one.cause is None else one.cause.name,
            "structure": [*one.structure],
            "acceptance": one.settings[0].acceptance,
            "happened": {name: count for name, count in self.happened.items() if count},
            "missing": [name for name in expected(row) if not self.happened[name]],
            "looked inside": bool(one.white_box),
            "seconds": round(self.seconds, 1),
        }


def noisy(policy: Policy, scale: float = 0.05, seed: int = 1) -> dict[str, Tensor]:
    """Return a model's weights with noise of ``scale`` times their own standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor.detach() + scale * tensor.detach().std() * torch.randn(tensor.shape, generator=generator)
        for name, tensor in policy.weights().items()
        if tensor.dim() == 2
    }


def run_row(row: Row, tokens: int, seed: int = 0, *, name: str = "embedded", progress: bool = True) -> Outcome:
    """Certify one row with an engine; store nothing."""
    began = time.perf_counter()
    system = SYSTEMS[row["system"]]
    model = ModelConfig(path="tiny", device="cpu", dtype="float32", draft="tiny" if system.separate else None)
    policy = load_policy(model, need_head=system.head, needs=system.needs, need_draft=system.separate)
    weights = {key: tensor.detach().clone() for key, tensor in policy.weights().items()}
    sets: list[Mapping[str, Tensor]] = [weights]
    references = [ModelReference(load_policy(replace(model, draft=None)))]
    if row["weights"] == "in flight":
        sets.append({**weights, **noisy(policy)})
        other = load_policy(replace(model, draft=None))
        other.load(sets[1])
        references.append(ModelReference(other))
    with TemporaryDirectory() as folder:
        if name != "embedded":
            save_policy(load_policy(model, need_head=True), Path(folder))
            engine: BusyEngine = BusyServer(name, row, Path(folder), sets)
        else:
            engine = BusyEngine(row, policy, sets, WhiteBox(ALPHA))
        shares = (0.5, 0.5) if engine.white_box is not None else (1.0, 0.0)
        source = prompts(model, TaskConfig(name="chain_sum", args={"min_terms": 2, "max_terms": 4}), 60)
        plan = Plan(
            settings=(Setting(name="as asked", params=params_of(row, model), weight=shares[0]),),
            white_box_weight=shares[1],
            vocabulary=policy.vocab_size,
            tokens=tokens,
            cohort=COHORT,
            alpha=ALPHA,
            limit_tv=LIMIT,
            seed=seed,
            progress=progress,
            stop_when_bounded=True,
            updated=len(sets) > 1,
        )
        run = Run(engine, VersionedReference(references), lambda index: source.prompt(index).token_ids, plan)
        with closing(engine):
            certificate = run.run()
    return Outcome(certificate=certificate, happened=engine.happened, seconds=time.perf_counter() - began)


# ---- all rows, and the page


def read(path: Path) -> dict[str, Any]:
    """Return the stored results; without a file, return no rows."""
    return json.loads(path.read_text()) if path.exists() else {"limit_tv": LIMIT, "alpha": ALPHA, "rows": []}


def find(stored: Mapping[str, Any], engine: str, row: Row) -> dict[str, Any] | None:
    """Return the result of an engine's row, or None."""
    return next((one for one in stored["rows"] if one["engine"] == engine and one["row"] == row), None)


def holds(one: Mapping[str, Any]) -> bool:
    """Return whether a row passed and all events that it needs happened."""
    return one["verdict"] == "pass" and not one["missing"]


def page(stored: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    lines = [
        "# What is certified",
        "",
        "`python -m recipes.certify.combinations` makes this page. Each row certifies an engine with the built-in",
        "model while several features are on together. Every pair of levels is in some row. A row passes if every",
        f"fault that was looked for moves less than {stored['limit_tv']:.0%} of the probability of a token, and if",
        "what it switches on happened. Usual levels are left out.",
    ]
    for engine, factors in ENGINES.items():
        results = [(row, find(stored, engine, row)) for row in covering(factors, possible)]
        done = [one for _, one in results if one is not None]
        lines += [
            "",
            f"## {engine}",
            "",
            f"{len(results)} rows, {len(done)} of them run, {sum(map(holds, done))} passed.",
            "",
            "| system | with | verdict | tokens | bound | drafts accepted |",
            "|---|---|---|---|---|---|",
            *(_line(factors, row, one) for row, one in results),
        ]
    return "\n".join([*lines, ""])


def _line(factors: Mapping[str, Sequence[str]], row: Row, one: Mapping[str, Any] | None) -> str:
    usual = {name: levels[0] for name, levels in factors.items()}
    on = ", ".join(f"{name} {level}" for name, level in row.items() if name != "system" and level != usual[name])
    cells = ["not run", "", "", ""]
    if one is not None:
        verdict = one["verdict"] if one["cause"] is None else f"{one['verdict']}: {one['cause']}"
        verdict += f" (never {', '.join(one['missing'])})" if one["missing"] else ""
        bound = "" if one["tv_bound"] is None else f"{one['tv_bound']:.2%}"
        accepted = "" if one["acceptance"] is None else f"{one['acceptance']:.0%}"
        cells = [verdict, f"{one['tokens']:,}", bound, accepted]
    return f"| {row['system']} | {on or 'nothing else'} | {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the missing rows; return 0 if every stored row of the engine passed."""
    parser = argparse.ArgumentParser(prog="python -m recipes.certify.combinations", description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=[*ENGINES], default="embedded", help="default: embedded")
    parser.add_argument("--rows", type=int, help="how many of the missing rows are run; default: all")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"of a row at most; default: {TOKENS:,}")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads; default: 2")
    parser.add_argument("--page", action="store_true", help="make the page alone, from what is stored")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of combinations.json and certified.md")
    given = parser.parse_args(arguments)
    for option in ("rows", "tokens", "threads"):
        if (number := getattr(given, option)) is not None and number < 1:
            parser.error(f"--{option}={number} is not possible: give 1 or more")
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    path, name = given.out / "combinations.json", given.engine
    stored = read(path)
    missing = [row for row in covering(ENGINES[name], possible) if find(stored, name, row) is None]
    chosen = [] if given.page else missing[: given.rows]
    if not missing and not given.page:
        print(f"no row is missing in {path}; nothing was run")
    for number, row in enumerate(chosen, start=1):
        print(f"row {number} of {len(chosen)}: " + ", ".join(row.values()), flush=True)
        result = {"engine": name, **run_row(row, given.tokens, name=name).stored(row), "commit": _commit()}
        stored["rows"].append(result)
        write_text(path, json.dumps(stored, indent=1) + "\n")
        print(f"  {result['verdict']}, bound {result['tv_bound']}, never {result['missing']}", flush=True)
    write_text(given.out / "certified.md", page(stored))
    return int(not all(holds(one) for one in stored["rows"] if one["engine"] == name))


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=FOLDER, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


if __name__ == "__main__":
    raise SystemExit(main())
