"""64 requests through the engine in fp64, for each system: plain, interrupted, and with changes in flight."""

from collections.abc import Callable

import numpy as np
import torch

from bebop.config.job import DecodingConfig
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import Completion, DecodeStats, SamplingParams
from tests.builders import tiny_policy
from tests.digests.numbers import Numbers

REQUESTS, SLOTS, VOCAB = 64, 12, 12
DISTRIBUTIONS: list[dict[str, float | int]] = [
    {},
    {"temperature": 0.7},
    {"temperature": 0.0},
    {"top_p": 0.8},
    {"top_k": 4, "temperature": 1.2},
    {"min_p": 0.05},
    {"repetition_penalty": 1.2},
]


def wanted() -> list[Request]:
    """Groups of four on a prompt of 1 to 9 tokens; every sampling setting; answers of up to 24 tokens."""
    rng = np.random.default_rng(5)
    prompts = [tuple(rng.integers(0, VOCAB - 1, rng.integers(1, 10)).tolist()) for _ in range(REQUESTS // 4)]
    return [
        Request(
            id=i,
            token_ids=prompts[i // 4],
            params=SamplingParams(
                max_new_tokens=6 + i % 19,
                stop_token_ids=(VOCAB - 1,),
                seed=1000 + i,
                **DISTRIBUTIONS[(i // 4) % len(DISTRIBUTIONS)],
            ),  # type: ignore[arg-type]
        )
        for i in range(REQUESTS)
    ]


def engine(system: str, on_update: str = "keep") -> TorchEngine:
    """Twelve slots, K = 3, a policy in fp64."""
    policy = tiny_policy(VOCAB, dtype=torch.float64)
    config = DecodingConfig(system=system, draft_tokens=3)
    return TorchEngine(policy, config, slots=SLOTS, max_length=40, on_update=on_update, room=4)


def finish(one: TorchEngine, done: dict[int, Completion]) -> None:
    """Run all requests to their end."""
    while one.unfinished:
        done.update({f.id: f.completion for f in one.step()})


def kept(done: dict[int, Completion]) -> Numbers:
    """Everything that a completion carries."""
    numbers = Numbers()
    for i in sorted(done):
        answer = done[i]
        assert "abort" != answer.finish_reason
        numbers.add(
            tokens=answer.token_ids, logprobs=answer.logprobs, versions=answer.versions,
            reason=[ord(answer.finish_reason[0])], exact=[answer.exact],
        )  # fmt: skip
        for start, stats in ((-1, answer.stats), *answer.stretches):
            numbers.add(start=[start], **counts(stats))
    return numbers


def counts(stats: DecodeStats) -> dict[str, object]:
    """Whole numbers apart from sums of probabilities."""
    work = [stats.cycles, stats.tokens, stats.target_forwards, stats.draft_forwards]
    tested = np.stack([stats.reached, stats.accepted]).astype(np.int64)
    return {
        "work": work, "tested": tested, "overlap": stats.overlap, "target_only": stats.target_only,
        "draft_entropy": stats.draft_entropy, "target_entropy": stats.target_entropy,
    }  # fmt: skip


def plain(system: str) -> Numbers:
    """All at once, from the first token to the last."""
    one, done = engine(system), {}  # type: tuple[TorchEngine, dict[int, Completion]]
    for request in wanted():
        one.add(request)
    finish(one, done)
    return kept(done)


def interrupted(system: str) -> Numbers:
    """All requests are aborted every five cycles and go on elsewhere, four times."""
    done: dict[int, Completion] = {}
    waiting = wanted()
    for _ in range(4):
        one = engine(system)
        for request in waiting:
            one.add(request)
        for _ in range(5):
            done |= {f.id: f.completion for f in one.step()}
        parts = {f.id: f.completion for f in one.abort()}
        waiting = [
            Request(id=r.id, token_ids=r.token_ids, params=r.params, partial=parts[r.id])
            for r in waiting
            if r.id in parts
        ]
    one = engine(system)
    for request in waiting:
        one.add(request)
    finish(one, done)
    return kept(done)


def changed(system: str) -> Numbers:
    """Every four cycles another system takes over, with one draft more or fewer."""
    one, done = engine(system), {}  # type: tuple[TorchEngine, dict[int, Completion]]
    names = sorted(NAMES)
    for request in wanted():
        one.add(request)
    for turn in range(1, 7):
        for _ in range(4):
            done |= {f.id: f.completion for f in one.step()}
        name = names[(names.index(system) + turn) % len(names)]
        one.configure(DecodingConfig(system=name, draft_tokens=2 + turn % 3))
    finish(one, done)
    return kept(done)


def updated(system: str, on_update: str) -> Numbers:
    """New weights every four cycles, backbone and head."""
    one, done = engine(system, on_update), {}  # type: tuple[TorchEngine, dict[int, Completion]]
    for request in wanted():
        one.add(request)
    for version in range(1, 6):
        for _ in range(4):
            done |= {f.id: f.completion for f in one.step()}
        other = tiny_policy(VOCAB, seed=version, dtype=torch.float64)
        one.load_weights(other.weights(mtp=True), version)
    finish(one, done)
    return kept(done)


NAMES = ("autoregressive", "target_only", "bebop", "bebop_adaptive")  # of the time of recording
SCENARIOS: dict[str, Callable[[], Numbers]] = {}
for _name in NAMES:
    SCENARIOS[f"{_name} plain"] = lambda name=_name: plain(name)  # type: ignore[misc]
    SCENARIOS[f"{_name} interrupted"] = lambda name=_name: interrupted(name)  # type: ignore[misc]
    SCENARIOS[f"{_name} keep"] = lambda name=_name: updated(name, "keep")  # type: ignore[misc]
    SCENARIOS[f"{_name} recompute"] = lambda name=_name: updated(name, "recompute")  # type: ignore[misc]
LATER = ("history", "bebop_history")  # recorded when they came; answers in progress beside one another count
for _name in LATER:
    SCENARIOS[f"{_name} plain"] = lambda name=_name: plain(name)  # type: ignore[misc]
    SCENARIOS[f"{_name} interrupted"] = lambda name=_name: interrupted(name)  # type: ignore[misc]
    SCENARIOS[f"{_name} keep"] = lambda name=_name: updated(name, "keep")  # type: ignore[misc]
for _name in NAMES[1:]:
    SCENARIOS[f"{_name} changed"] = lambda name=_name: changed(name)  # type: ignore[misc]
