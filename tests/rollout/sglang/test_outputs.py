"""SGLang's outputs as parts of answers."""

from base64 import b64encode
from dataclasses import replace

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.model.routing import Routers
from bebop.rollout.engine import nothing
from bebop.rollout.served_engine import appended
from bebop.rollout.sglang.outputs import output_chunk, parse_routing, refused
from bebop.trajectory import SamplingParams
from tests.builders import letters

PARAMS = SamplingParams()


def text(ids, params: SamplingParams, reason: str) -> str:
    return " ".join(map(str, ids))


def output(ids=(5, 6, 7, 8), reason: str = "length", **meta: object) -> dict:
    """Three tokens from two verification steps after the prefill's token."""
    base: dict = {
        "finish_reason": {"type": reason, "length": 4},
        "output_token_logprobs": [[-0.5 * token, token, None] for token in ids],
        "weight_version": "3",
        "completion_tokens": len(ids),
        "spec_verify_ct": 2,
        "spec_num_correct_drafts": 1,
        "spec_num_proposed_drafts": 6,
        "spec_correct_drafts_histogram": [1, 1],
    }
    return {"output_ids": list(ids), "meta_info": base | meta}


def test_tokens_logprobs_and_version() -> None:
    found = output_chunk(output(), PARAMS, 3)
    assert found.token_ids.tolist() == [5, 6, 7, 8]
    np.testing.assert_allclose(found.logprobs, [-2.5, -3, -3.5, -4])
    assert found.versions.tolist() == [3, 3, 3, 3]
    assert found.reason == "length"
    assert (found.token_ids.dtype, found.logprobs.dtype, found.versions.dtype) == (np.int64, np.float32, np.int64)


def test_routing_is_read_for_the_layers_with_experts() -> None:
    """SGLang gives all tokens but the last one, in all layers; those without experts have zeros."""
    routers = Routers(layers=(1, 2), experts=8, chosen=2, balancing=None)
    given = np.arange(6 * 3 * 2, dtype=np.int32).reshape(6, 3, 2) % 8
    encoded = b64encode(given.tobytes()).decode()
    meta = output(routed_experts=encoded, prompt_tokens=3)["meta_info"]
    found = parse_routing(meta, output_chunk(output(), PARAMS, 3), routers)
    assert found is not None and found.shape == (7, 2, 2) and found.dtype == np.int8
    assert np.array_equal(found[:6], given[:, 1:]) and (found[6] == -1).all()
    assert parse_routing(output()["meta_info"], output_chunk(output(reason="abort"), PARAMS, 3), routers) is None
    with pytest.raises(UserError, match="--enable-return-routed-experts"):
        parse_routing(output()["meta_info"], output_chunk(output(), PARAMS, 3), routers)


def test_a_completion_that_was_cut_keeps_the_routing_that_it_had() -> None:
    before = appended(nothing(), output_chunk(output(reason="abort"), PARAMS, 3), PARAMS, text, False)
    held = np.full((7, 2, 2), 1, dtype=np.int8)
    held[6] = -1
    later = replace(output_chunk(output(), PARAMS, 3), routing=np.full((11, 2, 2), 2, dtype=np.int8))
    joined = appended(replace(before, routing=held), later, PARAMS, text, False).routing
    assert joined is not None and joined[:, 0, 0].tolist() == [1] * 6 + [2] * 5
    nothing_new = appended(replace(before, routing=held), replace(later, routing=None), PARAMS, text, False).routing
    assert nothing_new is not None and nothing_new[:, 0, 0].tolist() == [1] * 6 + [-1] * 5


def test_versions_come_in_spans() -> None:
    spans = [{"version": "1", "start": 0, "end": 1}, {"version": "2", "start": 1, "end": 3}]
    spans.append({"version": "4", "start": 3, "end": 4})
    assert output_chunk(output(weight_versions=spans), PARAMS, 3).versions.tolist() == [1, 2, 2, 4]
    with pytest.raises(UserError, match="default"):
        output_chunk(output(weight_version="default"), PARAMS, 3)


def test_logprobs_of_other_tokens_are_noticed() -> None:
    with pytest.raises(AssertionError):
        output_chunk(output(output_token_logprobs=[[-1.0, 9, None]] * 4), PARAMS, 3)
    with pytest.raises(AssertionError):
        output_chunk(output(output_token_logprobs=[[-1.0, 5, None]]), PARAMS, 3)


def test_the_greedy_distribution_has_no_logprob_but_zero() -> None:
    assert not output_chunk(output(), SamplingParams(temperature=0.0), 3).logprobs.any()


def test_an_answer_that_was_cut_goes_on() -> None:
    first = appended(nothing(), output_chunk(output((5, 6), "abort"), PARAMS, 3), PARAMS, text, recomputed=False)
    assert first.finish_reason == "abort"
    second = output_chunk(output((7,), "stop", weight_version="4"), PARAMS, 3)
    whole = appended(first, second, PARAMS, text, recomputed=False)
    assert whole.token_ids.tolist() == [5, 6, 7] and whole.text == "5 6 7"
    assert whole.versions.tolist() == [3, 3, 4] and whole.finish_reason == "stop"
    assert whole.stats.cycles == 4 and whole.stats.tokens == 3


def test_an_answer_that_was_cut_before_it_began() -> None:
    bare = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}, "weight_version": "0"}}
    assert len(output_chunk(bare, PARAMS, 3).token_ids) == 0


def test_counts_of_all_steps() -> None:
    stats = output_chunk(output(), PARAMS, 3).stats
    assert (stats.cycles, stats.tokens, stats.target_forwards, stats.draft_forwards) == (2, 4, 2, 6)
    assert stats.reached.tolist() == [2, 1, 0] and stats.accepted.tolist() == [1, 0, 0]
    assert not stats.overlap.any()


def test_measured_steps_stand_for_the_others() -> None:
    entry = {"accepted": 1, "weight": 2, "overlap": [0.5, 0.25, 0.9], "target_only": [0.4, 0.3, 0.9]}
    entry |= {"draft_entropy": [1.0, 2.0, 9.0], "target_entropy": [0.5, 0.75, 9.0]}
    stats = output_chunk(output(bebop_verify=[entry]), PARAMS, 3).stats
    # The third draft was not tested: its distributions belong to a text that was thrown away.
    assert stats.overlap.tolist() == [1.0, 0.5, 0.0] and stats.target_only.tolist() == [0.8, 0.6, 0.0]
    assert stats.draft_entropy.tolist() == [2.0, 4.0, 0.0] and stats.target_entropy.tolist() == [1.0, 1.5, 0.0]
    assert stats.reached.tolist() == [2, 1, 0]


def test_a_completion_none_of_whose_steps_was_measured_has_nulls() -> None:
    """One for each token, where SGLang sends it together with a completion that has entries."""
    stats = output_chunk(output(bebop_verify=[None] * 4), PARAMS, 3).stats
    assert repr(stats) == repr(output_chunk(output(), PARAMS, 3).stats)


@pytest.mark.parametrize(
    ("ids", "written", "wanted"),
    [
        ((5, 6, 7, 8), 0, ([5, 6, 7, 8], "abort")),
        ((5, 9, 7, 8), 0, ([5, 9], "stop")),
        ((5, 6, 7, 9), 0, ([5, 6, 7, 9], "stop")),
        ((5, 6, 7, 8), 6, ([5, 6, 7, 8], "length")),
        ((5, 6, 7, 8), 8, ([5, 6], "length")),
        ((5, 6, 9, 8), 8, ([5, 6], "length")),
        ((5, 9, 7, 8), 8, ([5, 9], "stop")),
        ((), 3, ([], "abort")),
    ],
)
def test_what_an_aborted_request_wrote_behind_its_end_is_dropped(
    ids: tuple[int, ...], written: int, wanted: tuple[list[int], str]
) -> None:
    """9 ends a completion, and 10 tokens are the limit."""
    params = SamplingParams(max_new_tokens=10, stop_token_ids=(9,))
    found = output_chunk(output(ids, reason="abort"), params, 3, written=[1] * written)
    assert (found.token_ids.tolist(), found.reason) == wanted
    assert len(found.logprobs) == len(found.versions) == found.stats.tokens == len(wanted[0])
    assert output_chunk(output(ids), params, 3).token_ids.tolist() == [*ids]  # SGLang cut it itself


def test_a_stop_string_of_an_aborted_request_is_found() -> None:
    params = SamplingParams(max_new_tokens=10, stop=("ef",))
    found = output_chunk(output((5, 6, 7), reason="abort"), params, 3, [1, 4], letters(12))
    assert (found.token_ids.tolist(), found.reason) == ([5], "stop")  # "e" was written before
    found = output_chunk(output((5, 6, 7)), params, 3, [1, 4], letters(12))
    assert (found.token_ids.tolist(), found.reason) == ([5], "stop"), "SGLang sees only what came after the cut"
    assert len(found.logprobs) == len(found.versions) == 1


OLD_NAMES = [("spec_accept_token_num", "spec_draft_token_num"), ("spec_accepted_drafts", "spec_proposed_drafts")]


@pytest.mark.parametrize("names", OLD_NAMES)
def test_names_of_older_versions(names: tuple[str, str]) -> None:
    found = output()
    meta = found["meta_info"]
    for new, old in zip(("spec_num_correct_drafts", "spec_num_proposed_drafts"), names, strict=True):
        meta[old] = meta.pop(new)
    meta["spec_accept_histogram"] = meta.pop("spec_correct_drafts_histogram")
    stats = output_chunk(found, PARAMS, 3).stats
    assert stats.cycles == 2 and stats.accepted.tolist() == [1, 0, 0]


def test_an_answer_of_one_token_has_no_step() -> None:
    single = output((5,), spec_verify_ct=0)
    assert output_chunk(single, PARAMS, 3).stats.cycles == 0
    for name in [name for name in single["meta_info"] if name.startswith("spec_")]:
        del single["meta_info"][name]
    assert output_chunk(single, PARAMS, 3).stats.cycles == 0


def test_plain_decoding_counts_one_pass_a_token() -> None:
    stats = output_chunk(output(), PARAMS, 0).stats
    assert (stats.cycles, stats.tokens, stats.target_forwards) == (4, 4, 4)


def test_refusals_are_told_from_aborts() -> None:
    bad = {"type": "abort", "message": "too long", "status_code": 400}
    assert refused(output(finish_reason=bad)) == "too long"
    assert refused(output(finish_reason={"type": "abort", "message": "busy", "status_code": 503})) is None
    assert refused(output(finish_reason={"type": "abort", "message": "Abort in waiting queue"})) is None
    assert refused(output()) is None
