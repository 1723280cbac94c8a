"""A trace worked out again: p by a pass over the whole text, q and verdicts from what drafter and rule said."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.options import PadOptions
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems import SYSTEMS
from bebop.token_trace import NONE, TOP, VERDICTS, Trace
from bebop.trajectory import Completion
from tests.builders import requests

VOCAB, EOS = 12, 11
PROMPTS = [[1, 2, 3], [1, 2, 3], [4, 5, 6, 7, 8, 1], [9, 9, 9], [2, 3, 2, 3], [5, 1]]
DISTRIBUTIONS: list[dict[str, Any]] = [
    {}, {"temperature": 0.6}, {"top_k": 3}, {"temperature": 0.0}, {"repetition_penalty": 1.4}, {"top_p": 0.9}
]  # fmt: skip


def config(name: str) -> DecodingConfig:
    options = {"tau": 0.6, "p_min": 0.01} if SYSTEMS[name].options is PadOptions else {}  # it overrides now and then
    return DecodingConfig(system=name, draft_tokens=6 if SYSTEMS[name].tree else 3, options=options)


def engine(policy: Policy, name: str, slots: int = 3) -> TorchEngine:
    return TorchEngine(policy, config(name), slots=slots, max_length=64, room=6)


def wanted(traced: Sequence[int] = range(len(PROMPTS))) -> list[Request]:
    """Answers of 5 to 25 tokens, each under a distribution of its own; those of ``traced`` are traced."""
    asked = []
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, DISTRIBUTIONS, strict=True)):
        (one,) = requests([prompt], seed=40 + i, max_new_tokens=5 + 4 * i, stop_token_ids=(EOS,), **sampling)
        asked.append(dataclasses.replace(one, id=i, trace=i in traced))
    return asked


# ---- what the parts said, by request


@dataclass
class Said:
    """A cycle of a request: the draft, how many of it were accepted, along which nodes, and what came out of it."""

    drafts: list[int]
    parents: list[int]
    probs: np.ndarray | None  # [K, V]
    accepted: int
    nodes: list[int]  # those that stand
    count: int = 0  # tokens


@dataclass
class Listening:
    """Wraps drafter and rule of an engine; ``step`` advances it and notes every cycle of every request."""

    one: TorchEngine
    said: dict[int, list[Said]] = field(default_factory=dict)
    done: dict[int, Completion] = field(default_factory=dict)
    latest: tuple[Draft, Accepted] | None = None

    def __post_init__(self) -> None:
        decoder = self.one.decoder
        assert isinstance(decoder, DraftVerify)
        rule = decoder.rule.accept

        def accept(rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
            accepted = rule(rows, draft, out, uniforms)
            self.latest = (draft, accepted)
            return accepted

        decoder.rule.accept = accept  # type: ignore[method-assign]

    def run(self, asked: Sequence[Request]) -> dict[int, Completion]:
        for request in asked:
            self.one.add(request)
        while self.one.unfinished:
            self.step()
        return self.done

    def step(self) -> None:
        before = {r.id: self._written(r) for r in self.one.active}
        self.one._admit()
        active = list(self.one.active)
        ended = {f.id: f.completion for f in self.one.step()}
        self.done |= ended
        now = {r.id: self._written(r) for r in self.one.active} | {i: len(c.token_ids) for i, c in ended.items()}
        for slot, request in enumerate(active):
            cycle = self._row(slot)
            cycle.count = now[request.id] - before.get(request.id, 0)
            self.said.setdefault(request.id, []).append(cycle)

    def _written(self, request: Request) -> int:
        return int(self.one.slots.count[self.one.active.index(request)])

    def _row(self, slot: int) -> Said:
        assert self.latest is not None
        draft, accepted = self.latest
        count = draft.tokens.shape[1] if draft.lengths is None else int(draft.lengths[slot])
        parents = list(range(-1, count - 1)) if draft.parents is None else draft.parents[slot].tolist()
        stands = int(accepted.lengths[slot])
        nodes = list(range(stands)) if draft.parents is None else (accepted.rows[slot, 1 : 1 + stands] - 1).tolist()
        return Said(
            drafts=draft.tokens[slot, :count].tolist(),
            parents=parents[:count],
            probs=None if draft.probs is None else draft.probs[slot, :count].double().numpy(),
            accepted=stands,
            nodes=nodes,
        )


# ---- what follows from that


def target(policy: Policy, request: Request, answer: np.ndarray) -> np.ndarray:
    """[T, V] that each token was drawn from, by a pass over the whole text and arithmetic of its own."""
    ids = torch.tensor([*request.token_ids, *answer.tolist()])
    with torch.no_grad():
        hidden = policy.hidden(ids[None], torch.arange(len(ids))[None], PackedContext(torch.tensor([len(ids)])))
        logits = policy.logits(hidden)[0].double().numpy()[len(request.token_ids) - 1 : -1]
    rows, params = [], request.params
    for t, row in enumerate(logits):
        seen = [*request.token_ids, *answer[:t].tolist()]
        z = row.copy()
        for token in set(seen):
            z[token] = z[token] / params.repetition_penalty if z[token] > 0 else z[token] * params.repetition_penalty
        if params.temperature == 0:
            rows.append(np.eye(VOCAB)[z.argmax()])
            continue
        p = np.exp((z - z.max()) / params.temperature)
        p /= p.sum()
        order = np.argsort(-p, kind="stable")
        ranked = p[order]
        kept = np.arange(VOCAB) < (params.top_k or VOCAB)
        ranked = ranked * kept / (ranked * kept).sum()
        ranked = ranked * (ranked.cumsum() - ranked < (params.top_p if params.top_p < 1 else np.inf))
        p[order] = ranked / ranked.sum()
        rows.append(p)
    return np.array(rows)


def entropy(p: np.ndarray) -> float:
    return float(-(p[p > 0] * np.log(p[p > 0])).sum())


def check_top(ids: np.ndarray, top: np.ndarray, p: np.ndarray) -> None:
    """The likeliest first; equal ones in any order."""
    known = ids != NONE
    np.testing.assert_allclose(top.astype(float), np.sort(p)[::-1][: len(top)], atol=1e-3)
    np.testing.assert_allclose(p[ids[known]], top[known].astype(float), atol=1e-3)
    assert len(set(ids[known].tolist())) == known.sum() == min(TOP, (p > 0).sum())


def check(policy: Policy, request: Request, answer: Completion, cycles: Sequence[Said], drafter: str) -> None:
    """Every field of every row."""
    trace, p = answer.trace, target(policy, request, answer.token_ids)
    assert trace is not None and len(trace) == len(answer.token_ids) == sum(c.count for c in cycles)
    t = 0
    for number, cycle in enumerate(cycles):
        node = -1
        for k in range(cycle.count):
            children = [i for i, parent in enumerate(cycle.parents) if parent == node]
            token, stands = int(answer.token_ids[t]), k < cycle.accepted
            last = "plain" if not cycle.drafts else "recovered" if children else "bonus"
            assert VERDICTS[trace.verdicts[t]] == ("accepted" if stands else last)
            assert trace.cycles[t] == number
            np.testing.assert_allclose(trace.target_entropy[t], entropy(p[t]), atol=1e-5)
            check_top(trace.target_ids[t], trace.target_top[t], p[t])
            if children:
                check_draft(trace, t, p[t], cycle, children[0], token if stands else None)
                assert trace.names[trace.drafters[t]] == drafter
            else:
                assert trace.drafters[t] == trace.drafts[t] == NONE and (trace.draft_ids[t] == NONE).all()
                numbers = (trace.draft_target_probs, trace.draft_probs, trace.overlap, trace.draft_entropy)
                assert all(np.isnan(values[t]) for values in numbers) and np.isnan(trace.draft_top[t]).all()
            node = cycle.nodes[k] if stands else -2
            t += 1


def check_draft(trace: Trace, t: int, p: np.ndarray, cycle: Said, first: int, kept: int | None) -> None:
    """The first child says what was proposed; the draft is the one that stands, if one does."""
    drafted = cycle.drafts[first] if kept is None else kept
    assert trace.drafts[t] == drafted
    np.testing.assert_allclose(trace.draft_target_probs[t], p[drafted], atol=1e-5)
    if cycle.probs is None:
        q, chance = np.eye(VOCAB)[cycle.drafts[first]], 1.0
    else:
        q = cycle.probs[first]
        chance = q[drafted]
    np.testing.assert_allclose(trace.draft_probs[t], chance, atol=1e-6)
    np.testing.assert_allclose(trace.overlap[t], np.minimum(p, q).sum(), atol=1e-5)
    np.testing.assert_allclose(trace.draft_entropy[t], entropy(q), atol=1e-5)
    check_top(trace.draft_ids[t], trace.draft_top[t], q)


def check_sums(answer: Completion) -> None:
    """Rows add up to the answer's own statistics, position by position."""
    trace, stats = answer.trace, answer.stats
    assert trace is not None
    place = np.arange(len(trace)) - np.searchsorted(trace.cycles, trace.cycles)
    tested = trace.drafts != NONE
    sums: Mapping[str, np.ndarray] = {
        "reached": tested.astype(float),
        "accepted": (trace.verdicts == VERDICTS.index("accepted")).astype(float),
        "overlap": trace.overlap,
        "target_entropy": trace.target_entropy,
        "draft_entropy": trace.draft_entropy,
    }
    assert len(np.unique(trace.cycles)) == stats.cycles
    for name, values in sums.items():
        own = getattr(stats, name)
        found = np.array([values[tested & (place == k)].sum() for k in range(len(own))])
        np.testing.assert_allclose(found, own, atol=1e-4, err_msg=name)
        assert place[tested].max(initial=-1) < len(own) or not tested.any()


def same(a: Trace | None, b: Trace | None) -> bool:
    assert a is not None and b is not None
    pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(Trace)]
    return all(np.array_equal(x, y, equal_nan=np.asarray(x).dtype.kind == "f") for x, y in pairs)
