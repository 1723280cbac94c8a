"""Drafts from history: the cost of remembering and lookups, and decoding with past completions beside plain and Bebop.

The past completions are the built-in model's own, under its current weights, as right after an epoch in which it hardly
changed: the best case. Each arm has its own engine, which first receives them; this counts in its time. Arms take
turns; processor time counts, and the best of the rounds.
"""

import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

from bebop.bench.record import best_of, noted
from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.rollout.engine import Request
from bebop.rollout.history import BEGIN, ROOT, Automaton
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from bebop.systems.history.matching import Followers, MatchState, Next, SuffixMatch
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import DecodeStats, SamplingParams

ARMS = ("autoregressive", "bebop", "ngram", "history", "bebop_history")
Past = Mapping[tuple[int, ...], Sequence[Sequence[int]]]  # prompt -> answers
# Functions timed within a cycle: the lookups, and the bookkeeping of rows beside them.
TIMED: tuple[tuple[str, type, tuple[str, ...]], ...] = (
    ("lookup", SuffixMatch, ("advance",)),
    ("lookup", Next, ("of",)),
    ("lookup", Followers, ("go_on",)),
    ("bookkeeping", MatchState, ("ahead", "trusted", "paces", "learn", "follow")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryBench:
    """Settings of the benchmark."""

    model: ModelConfig
    task: TaskConfig
    arms: tuple[str, ...] = ARMS
    batches: tuple[int, ...] = (1, 8)
    prompts: int = 32
    answers: int = 8  # past ones of each prompt
    rounds: int = 3
    draft_tokens: int = 3  # where history does not draft; there it is the default of the system
    max_new_tokens: int = 160


def run(bench: HistoryBench) -> list[dict[str, Any]]:
    """Return a row for lookups alone, then one per arm and batch size."""
    policy = load_policy(bench.model, need_head=any(SYSTEMS[arm].head for arm in bench.arms))
    source = PromptSource(bench.task, chat_encoder(policy.tokenizer), 1024)
    sampling = SamplingParams(max_new_tokens=bench.max_new_tokens, stop_token_ids=policy.eos_token_ids)
    prompts = [source.prompt(i).token_ids for i in range(bench.prompts)]
    asked = [Request(id=i, token_ids=ids, params=replace(sampling, seed=i)) for i, ids in enumerate(prompts)]
    past = remembered(TorchEngine(policy, DecodingConfig(), slots=32), asked, bench.answers)
    rows = [noted(lookups(past))]
    progress = tqdm(total=len(bench.batches) * bench.rounds * len(bench.arms), desc="history")
    for batch in bench.batches:
        measure = partial(decoded, partial(engine, policy, bench, batch), asked, past)
        best = best_of(bench.rounds, bench.arms, measure, "tokens/s", progress, batch=batch)
        plain = next((best[arm]["tokens/s"] for arm in bench.arms if not SYSTEMS[arm].drafts), None)
        for arm, row in best.items():
            against = {} if plain is None else {"x plain": row["tokens/s"] / plain}
            rows.append({"batch": batch, "arm": arm, **row, **against})
    progress.close()
    return rows


def engine(policy: Policy, bench: HistoryBench, batch: int, arm: str) -> TorchEngine:
    """Return a new engine for an arm."""
    system = SYSTEMS[arm]
    drafts = system.draft_tokens if system.history else bench.draft_tokens
    return TorchEngine(policy, DecodingConfig(system=arm, draft_tokens=drafts), slots=batch)


def remembered(one: TorchEngine, asked: Sequence[Request], answers: int) -> Past:
    """Return other completions of the same prompts."""
    again = [
        replace(r, params=replace(r.params, seed=(1 + k) * len(asked) + r.id)) for r in asked for k in range(answers)
    ]
    past: dict[tuple[int, ...], list[list[int]]] = {}
    for request, answer in zip(again, generate(one, again), strict=True):
        past.setdefault(request.token_ids, []).append(answer.token_ids.tolist())
    return past


def lookups(past: Past) -> dict[str, Any]:
    """Return the cost of remembering a token, in time and memory, and of a lookup."""
    tracemalloc.start()
    kept = [_built(answers) for answers in past.values()]
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    started = time.process_time()
    for answers in past.values():
        _built(answers)
    built = time.process_time() - started
    tokens, found = sum(texts.tokens for texts in kept), 0
    started = time.process_time()
    for texts, answers in zip(kept, past.values(), strict=True):
        match = SuffixMatch(texts)
        for token in (BEGIN, *answers[-1]):
            match.advance(token)
            found += Next.of(match, greedy=False) is not None
    looked = time.process_time() - started
    read = sum(1 + len(answers[-1]) for answers in past.values())
    return {
        "arm": "lookups alone",
        "tokens kept": tokens,
        "us/token kept": 1e6 * built / tokens,
        "bytes/token kept": size / tokens,
        "us/lookup": 1e6 * looked / read,
        "found %": 100 * found / read,
    }


def _built(answers: Sequence[Sequence[int]]) -> Automaton:
    texts = Automaton()
    for answer in answers:
        state = ROOT
        for token in (BEGIN, *answer):
            state = texts.append(state, token)
    return texts


def decoded(make: Callable[[str], TorchEngine], asked: Sequence[Request], past: Past, arm: str) -> dict[str, Any]:
    """Time one turn of an arm; return its row."""
    one = make(arm)
    with looking_up(SYSTEMS[arm].history) as spent:
        started = time.process_time()
        if SYSTEMS[arm].history:
            for prompt, known in past.items():
                one.remember(prompt, known)
        told = time.process_time() - started
        answers = generate(one, asked)
        total = time.process_time() - started
    stats = DecodeStats.total(a.stats for a in answers)
    row = {"tokens/s": stats.tokens / total, "accept length": stats.accept_length}
    row["passes of the drafter/token"] = stats.draft_forwards / stats.tokens
    if SYSTEMS[arm].history:
        drafts, kept = stats.reached.sum(), stats.accepted.sum()
        share, share_kept = (stats.counts[name].sum() for name in ("history", "history_accepted"))
        row |= {"history/draft": float(share / drafts), "history accepted": float(share_kept / share)}
        if drafts > share:
            row["head accepted"] = float((kept - share_kept) / (drafts - share))
        row |= {"remember %": 100 * told / total, **{f"{part} %": 100 * s / total for part, s in spent.items()}}
    return row


@contextmanager
def looking_up(history: bool) -> Iterator[dict[str, float]]:
    """Yield the seconds of each part of TIMED; of nested calls only the outer one counts."""
    spent = dict.fromkeys(("lookup", "bookkeeping"), 0.0)
    if not history:
        yield spent
        return
    places = [(part, owner, name) for part, owner, names in TIMED for name in names]
    before = [owner.__dict__[name] for _, owner, name in places]
    depth = [0]

    def timed(function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            started = time.process_time()
            depth[0] += 1
            try:
                return function(*arguments, **named)
            finally:
                depth[0] -= 1
                if not depth[0]:
                    spent[part] += time.process_time() - started

        return call

    for (part, owner, name), plain in zip(places, before, strict=True):
        bound = isinstance(plain, classmethod)
        setattr(owner, name, classmethod(timed(plain.__func__, part)) if bound else timed(plain, part))
    try:
        yield spent
    finally:
        for (_, owner, name), plain in zip(places, before, strict=True):
            setattr(owner, name, plain)
