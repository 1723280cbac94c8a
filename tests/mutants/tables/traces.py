"""Faults in traces: which row of which cycle a token is said to come from, and what is said of it."""

from tests.mutants.fault import fault

TRACER, PLACES, SERVED = "rollout/decoding/tracing.py", "rollout/decoding/places.py", "rollout/sglang/tracing.py"
TESTS = "rollout/test_tracing.py::"
FIELDS = f"{TESTS}test_every_field_is_what_the_model_and_the_drafter_say"
CUT = f"{TESTS}test_what_a_stop_string_cuts_off_has_no_row"
ALONE = f"{TESTS}test_what_is_traced_depends_on_nobody_beside_it_and_changes_no_answer"
PARTS = f"{TESTS}test_an_interrupted_answer_has_the_rows_of_both_parts"
MIDWAY = f"{TESTS}test_who_drafted_is_known_when_systems_change_midway"

FAULTS = (
    fault(
        "traces/row-of-the-next-token",
        PLACES,
        "target_ids, target_chances = likeliest(p, top)",
        "target_ids, target_chances = likeliest(p.roll(-1, 1), top)",
        FIELDS,
    ),
    fault("traces/overlap-late", PLACES, "torch.minimum(p[:, :drafts], q)", "torch.minimum(p[:, 1:], q)", FIELDS),
    fault(
        "traces/bonus-as-recovered",
        PLACES,
        "torch.where(lengths < made, RECOVERED",
        "torch.where(lengths <= made, RECOVERED",
        FIELDS,
    ),
    fault("traces/drafts-that-do-not-count", PLACES, "if made is None else made", "if True else made", FIELDS),
    fault(
        "traces/first-child-for-its-sibling",
        PLACES,
        "torch.where(stands, tokens, pad(draft, (0, 1)))",
        "pad(draft, (0, 1))",
        f"{FIELDS}[bebop_tree]",
    ),
    fault(
        "traces/rows-stay-behind",
        TRACER,
        "self._cycles[target], self._chosen = self._cycles.pop(source), None",
        "self._cycles[target], self._chosen = self._cycles[source], None",
        FIELDS,
    ),
    fault("traces/index-kept", TRACER, "self._cycles[slot], self._chosen = [], None", "self._cycles[slot] = []", ALONE),
    fault("traces/part-before-lost", TRACER, "before.trace or unknown(done, top)", "unknown(done, top)", PARTS),
    fault(
        "traces/beyond-the-cut",
        PLACES,
        "np.flatnonzero(table[:, 0] != NONE)[:count]",
        "np.flatnonzero(table[:, 0] != NONE)",
        CUT,
    ),
    fault(
        "traces/drafter-of-before",
        "rollout/torch_engine.py",
        "self.decoding, self.tracer.drafter = decoding, then.drafter",
        "self.decoding = decoding",
        MIDWAY,
    ),
    fault(
        "traces/every-prompt-a-sample",
        "bebop/token_trace.py",
        "index % groups_per_step == 0",
        "index % 1 == 0",
        f"{TESTS}test_a_worker_asks_for_what_the_job_wants",
    ),
    fault(
        "traces/chunk-of-another",
        PLACES,
        "* CHUNK + places % CHUNK",
        "* CHUNK + places // CHUNK",
        f"{TESTS}test_the_likeliest_of_a_large_vocabulary",
    ),
    fault(
        "traces/served-row-of-another",
        SERVED,
        ".view(rows, width, -1)[at]",
        ".view(rows, width, -1)[at - 1]",
        "rollout/sglang/test_tracing.py::test_the_trace_is_that_of_the_distributions",
    ),
    fault(
        "traces/served-drafts-overwritten",
        SERVED,
        "verify.draft_probs[chosen].clone()",
        "verify.draft_probs",
        "rollout/sglang/test_tracing.py::test_the_trace_is_that_of_the_distributions",
    ),
    fault(
        "traces/served-never-compared",
        SERVED,
        "if not np.array_equal(written, ids[1:]):",
        "if False:",
        "rollout/sglang/test_tracing.py::test_what_does_not_add_up_is_not_told",
    ),
)
