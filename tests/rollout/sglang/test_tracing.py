"""Traces of SGLang's answers, from made-up cycles; what the real one does is tested in tests/integration/sglang."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from bebop.rollout.engine import Request, nothing
from bebop.rollout.served_engine import appended
from bebop.rollout.sglang.outputs import output_chunk
from bebop.rollout.sglang.plugin import _distribution
from bebop.rollout.sglang.tracing import ENTRY, PREFIX, Following, parse_trace
from bebop.trajectory import NONE, VERDICTS, SamplingParams, Trace
from tests.rollout.sglang.test_engine import Counting, make
from tests.rollout.sglang.test_outputs import output, text
from tests.rollout.sglang.test_plugin import B, K, V, step

ACCEPTED = [0, 1, 2]  # of the rows, in every cycle


def original(verify: Any, batch: Any, logits: Any, *args: Any) -> Any:
    """Stands for ``eagle_sample``; the token after the drafts is 6, and draft distributions are overwritten."""
    width = K + 1
    predicted = torch.full((B * width,), 6, dtype=torch.int32)
    index = torch.arange(B * width, dtype=torch.int32).view(B, width)
    if verify.draft_probs is not None:
        verify.draft_probs.zero_()
    return predicted, torch.tensor(ACCEPTED) + 1, index


def cycle(seed: int, names: list[str], **options: Any) -> tuple[Any, Any, Any, torch.Tensor | None]:
    verify, batch, logits = step(seed, **options)
    batch.reqs = [SimpleNamespace(rid=name) for name in names]
    drawn = None if verify.draft_probs is None else verify.draft_probs.clone()
    Following(_distribution, lambda: True)(original, verify, batch, logits)
    return verify, batch, logits, drawn


NAMES = ["bebop-1.", PREFIX + "2.", PREFIX + "3."]


def answer(row: int, cycles: int = 3, **options: Any) -> tuple[dict[str, Any], list[int], list[Any]]:
    """Entries of a row, its tokens after the prefill's, and the cycles."""
    made = [cycle(seed, NAMES, **options) for seed in range(cycles)]
    ids = [5]
    for verify, *_ in made:
        ids += [*verify.draft_token.view(B, K + 1)[row, 1 : 1 + ACCEPTED[row]].tolist(), 6]
    return {ENTRY: [logits.customized_info[ENTRY][row] for _, _, logits, _ in made]}, ids, made


def of(meta: dict[str, Any], ids: list[int]) -> Trace:
    found = parse_trace(meta, np.array(ids), "mtp")
    assert found is not None and len(found) == len(ids)
    return found


@pytest.mark.parametrize("drafts", [True, False])
def test_the_trace_is_that_of_the_distributions(drafts: bool) -> None:
    meta, ids, made = answer(1, drafts=drafts)
    trace = of(meta, ids)
    assert [VERDICTS[v] for v in trace.verdicts] == ["plain", *["accepted", "recovered"] * 3]
    assert trace.cycles.tolist() == [NONE, 0, 0, 1, 1, 2, 2] and np.isnan(trace.target_entropy[0])
    for number, (verify, batch, logits, drawn) in enumerate(made):
        for k in range(2):
            t = 1 + 2 * number + k
            p = (logits.next_token_logits[K + 1 + k].double() / float(batch.sampling_info.temperatures[1])).softmax(-1)
            token = int(verify.draft_token.view(B, K + 1)[1, 1 + k])
            q = torch.eye(V)[token].double() if drawn is None else drawn[1, k].double()
            assert trace.drafts[t] == token and trace.names[trace.drafters[t]] == "mtp"
            np.testing.assert_allclose(trace.draft_target_probs[t], p[token], atol=1e-6)
            np.testing.assert_allclose(trace.draft_probs[t], q[token], atol=1e-6)
            np.testing.assert_allclose(trace.overlap[t], torch.minimum(p, q).sum(), atol=1e-6)
            np.testing.assert_allclose(trace.target_top[t], p.sort(descending=True).values, atol=1e-3)


def test_a_bonus_and_an_answer_that_ends_within_a_cycle() -> None:
    meta, ids, _ = answer(2)
    trace = of(meta, ids[:6])
    assert [VERDICTS[v] for v in trace.verdicts] == ["plain", "accepted", "accepted", "bonus", "accepted", "accepted"]
    assert trace.drafts[3] == NONE


def test_what_does_not_add_up_is_not_told() -> None:
    """Such as an answer with a second prefill, or one that began before entries were made."""
    meta, ids, _ = answer(2)
    assert parse_trace(meta, np.array([5, *ids]), "mtp") is None
    assert parse_trace(meta, np.array([*ids, 6]), "mtp") is None
    assert parse_trace({}, np.array(ids), "mtp") is None and parse_trace({ENTRY: [{}]}, np.array(ids), "mtp") is None


def test_nobody_else_is_looked_at() -> None:
    *_, logits, _ = cycle(0, NAMES)
    assert [bool(entry) for entry in logits.customized_info[ENTRY]] == [False, True, True]
    *_, logits, _ = cycle(0, ["bebop-1.", "certify-2.", "other"])
    assert logits.customized_info is None
    *_, logits, _ = cycle(0, NAMES, greedy=True)
    assert logits.customized_info is None


def test_parts_of_an_answer_are_joined() -> None:
    meta, ids, _ = answer(1)
    params = SamplingParams()
    plain = output_chunk(output(tuple(ids)), params, K)
    known = dataclasses.replace(plain, trace=of(meta, ids))
    first = appended(nothing(), known, params, text, False)
    assert first.trace is not None and len(first.trace) == len(ids)
    both = appended(first, plain, params, text, False).trace
    again = appended(appended(nothing(), plain, params, text, False), known, params, text, False).trace
    assert both is not None and again is not None and len(both) == len(again) == 2 * len(ids)
    unknown = VERDICTS.index("unknown")
    assert (both.verdicts == unknown).tolist() == [t >= len(ids) for t in range(len(both))]
    assert (again.verdicts == unknown).tolist() == [t < len(ids) for t in range(len(both))]
    assert appended(nothing(), plain, params, text, False).trace is None


def test_a_request_that_is_traced_has_a_name_of_its_own() -> None:
    engine = make(Counting(0.01))
    server: Any = engine.server
    asked = Request(id=1, token_ids=(1, 2), params=SamplingParams(max_new_tokens=5))
    names = [server.payload(dataclasses.replace(asked, trace=trace), ())["rid"] for trace in (True, False)]
    assert [name.startswith(PREFIX) for name in names] == [True, False]
    engine.close()
