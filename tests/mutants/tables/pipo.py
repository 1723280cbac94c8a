"""Faults in decoding in pairs: what is fed and drawn, what goes on after an abort, what is counted."""

from tests.mutants.fault import fault

DECODER, ENGINE = "rollout/decoding/pipo.py", "rollout/torch_engine.py"
STATES = "rollout/test_pipo.py::test_states_are_those_of_a_full_forward"
DRAWN = "rollout/test_pipo.py::test_the_engine_draws_what_passes_over_the_whole_text_draw"
ENDS = "rollout/test_pipo.py::test_an_end_is_an_end_in_both_places_of_a_pair"
RESUMED = "rollout/test_pipo_changes.py::test_an_aborted_answer_goes_on_in_its_pairs"
JOINT = "rollout/test_pipo_distribution.py::test_three_tokens_have_the_pair_networks_distribution[confidence]"

FAULTS = (
    fault("pipo/draft-from-the-token-before", DECODER, "self.policy.embed(token)[:, None]",
          "self.policy.embed(self.pair[: rows.batch, 0])[:, None]", STATES),
    fault("pipo/rejected-drafts-fed", DECODER, "torch.where(emitted == 2, slots.last[:batch], filler)",
          "torch.where(emitted == 2, slots.last[:batch], accepted.tokens[:, -1])", STATES),
    fault("pipo/prompt-drafts-from-second-tokens", DECODER, "embeddings[:, 1:, 0]", "embeddings[:, 1:, 1]", STATES),
    fault("pipo/entries-as-tokens", DECODER, "slots.fed[:batch] += 1", "slots.fed[:batch] += emitted",
          "rollout/test_pipo.py::test_an_entry_of_the_caches_is_a_pair"),
    fault("pipo/gate-shut-by-confidence", DECODER, "confidence >= self.tau", "confidence < self.tau", JOINT),
    fault("pipo/one-number-for-both", DECODER, "rows.uniforms[:, 1]", "rows.uniforms[:, 0]", JOINT),
    fault("pipo/pad-drawn", "bebop/model/pipo.py", 'logits.masked_fill(never, float("-inf"))', "logits", JOINT),
    fault("pipo/penalty-forgets-the-first", DECODER, "rows.seen.scatter(1, token[:, None], True)[:, None]",
          "rows.seen[:, None]", DRAWN),
    fault("pipo/exact", DECODER, "slots.exact[:batch] = False", "pass", DRAWN),
    fault("pipo/pairs-lost", DECODER, "whole = bool(kept[place]) and place + 1 < len(answer)",
          "whole = False", RESUMED),
    fault("pipo/shared-by-tokens", "rollout/admission.py", "runs[-1].read == read and",
          "contexts[runs[-1].targets[0] - first] == contexts[offset] and",
          "rollout/test_pipo_changes.py::test_equal_tokens_in_other_pairs_are_not_shared"),
    fault("pipo/entries-left-out", DECODER, "return self.drafting and not before", "return False",
          "rollout/test_pipo_changes.py::test_a_threshold_that_comes_back_finds_the_entries_that_were_left_out"),
    fault("pipo/reached-beyond-the-end", DECODER, "reached = whole == 2", "reached = whole > 0", ENDS),
    fault("pipo/cut-one-late", DECODER, ", emitted, ahead=1)", ", emitted)", ENDS),
    fault("pipo/records-of-kept-drafts-alone", DECODER, "torch.where(reached, second.draft, NONE)",
          "torch.where(reached & second.kept, second.draft, NONE)",
          "rollout/test_pipo.py::test_records_of_a_finished_answer_say_what_was_drafted"),
    fault("pipo/state-of-aborted-answers-alone", ENGINE, 'if reason == "abort" or self.keep_state else {}',
          'if reason == "abort" else {}',
          "rollout/test_pipo.py::test_records_of_a_finished_answer_say_what_was_drafted"),
    fault("pipo/trained-on", "bebop/config.py", 'check(not refused, "decoding.system", system, refused)', "pass",
          "rollout/test_pipo_refusals.py::test_a_job_cannot_train_on_them_and_names_what_does"),
    fault("pipo/served", "rollout/sglang/hosting.py", "    if system.unserved:\n", "    if False:\n",
          "rollout/test_pipo_refusals.py::test_other_engines_say_what_they_lack"),
)  # fmt: skip
