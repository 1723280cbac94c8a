"""Faults in what a certificate sees of a live engine: inside verification, of its answers, and of the model."""

from tests.mutants.fault import fault

BOX, ENGINE, MODEL = (f"bebop/certify/{name}.py" for name in ("white_box", "embedded", "model_reference"))
FAIR = "certify/test_white_box.py::test_every_bet_is_worth_one_in_the_mean_over_all_outcomes"
FOUND = "certify/test_white_box.py::test_a_fault_is_found_in_its_own_draw"
PARTS = "certify/test_white_box.py::test_rows_that_do_not_fit_at_once_and_drafts_that_do_not_count"
ANSWERS = "certify/test_embedded.py::test_answers_are_those_of_the_engine_and_cycles_add_up"
STOPPED = "certify/test_embedded.py::test_an_interrupted_call_gives_what_is_there"
WHOLE = "certify/test_embedded.py::test_where_drafts_are_judged_as_a_whole_some_draws_cannot_be_tested"
TREES = "certify/test_embedded.py::test_what_has_no_chain_is_not_looked_into"
REPORTED = "certify/test_model_reference.py::test_log_probs_are_those_that_the_engine_reports"
ROWS = "certify/test_model_reference.py::test_the_first_draft_and_the_row_before"
SLOWLY = "certify/test_model_reference.py::test_processing_is_what_it_says"
COLUMNS = "certify/test_model_reference.py::test_of_a_large_vocabulary_the_likeliest_tokens_have_columns"
STRIKES = "recipes/reproduce/test_certificate.py::test_a_fault_strikes_where_it_says"

FAULTS = (
    fault("white-box/rejections-unseen", BOX, "(steps <= accepted[:, None])", "(steps < accepted[:, None])", FAIR),
    fault("white-box/bonus-of-the-row-before", BOX, "bonus = p[full, end]", "bonus = p[full, last]", FAIR),
    fault("white-box/residual-both-ways", BOX, "_unit((p - q).clamp_min(0), p)", "_unit((p - q).abs(), p)", FAIR),
    fault("white-box/coins-only-win", BOX, "(1 - b) / (1 - a).clamp_min(1e-9))", "torch.ones_like(b))", FAIR),
    fault(
        "white-box/uncounted-drafts",
        BOX,
        "made = steps < lengths[:, None]",
        "made = steps < 99 + lengths[:, None]",
        PARTS,
    ),
    fault("white-box/stops-kept", BOX, "going_on[:, list(stops)] = 0", "pass", FOUND),
    fault(
        "white-box/uniform-of-the-test",
        BOX,
        "torch.maximum(cdf - left, chance)",
        "torch.maximum(cdf - left, 0 * chance)",
        FOUND,
    ),
    fault("white-box/whole-as-steps", "rollout/decoding/rules/block.py", "stepwise = False", "stepwise = True", WHOLE),
    fault("white-box/trees-as-chains", ENGINE, "elif draft.parents is not None:", "elif False:", TREES),
    fault(
        "embedded/finished-cycle-lost",
        ENGINE,
        "for one in finished}\n        lengths |=",
        "for one in ()}\n        lengths |=",
        ANSWERS,
    ),
    fault("embedded/aborted-answers-lost", ENGINE, "for one in stopped}", "for one in ()}", STOPPED),
    fault("reference/row-late", MODEL, "self._logits(hidden[at - 1])", "self._logits(hidden[at - 2])", REPORTED),
    fault("reference/draft-late", MODEL, "drafting[(at - 2).clamp_min(0)]", "drafting[(at - 3).clamp_min(0)]", ROWS),
    fault("reference/penalty-the-wrong-way", MODEL, "torch.where(logits < 0,", "torch.where(logits > 0,", SLOWLY),
    fault("reference/nucleus-one-short", MODEL, "descending.cumsum(-1) - descending", "descending.cumsum(-1)", SLOWLY),
    fault(
        "reference/columns-of-what-came",
        MODEL,
        "hit.any(1), hit.int().argmax(1)",
        "hit.any(1), 0 * hit.int().argmax(1)",
        COLUMNS,
    ),
    fault(
        "certificate/struck-everywhere",
        "recipes/reproduce/certificate/verification.py",
        "own.dim() - 1)), other, own)",
        "own.dim() - 1)) | True, other, own)",
        STRIKES,
    ),
)
