"""Faults in drafts from history: what is matched and counted, drawn and reported, trusted, kept and sent along."""

from tests.mutants.fault import fault

TEXTS, RECALL, PAST = "rollout/history.py", "rollout/decoding/recall.py", "bebop/past_answers.py"
MATCHING = "rollout/decoding/matching.py"
LOOP = "rollout/test_matching.py::test_one_loop_draws_what_single_steps_do"
ALONE, MIXED = "rollout/decoding/drafters/history.py", "rollout/decoding/drafters/history_mtp.py"
GROWN = "rollout/test_history.py::test_texts_that_grow_in_turns_are_matched_as_a_search_finds_them"
READ = "rollout/test_history.py::test_a_reader_matches_what_a_search_finds"
BOUND = "rollout/test_history.py::test_what_is_kept_stays_within_the_bound_and_the_oldest_goes"
OLDEST = "rollout/test_history.py::test_the_prompt_asked_longest_ago_goes_first"
TOLD = "rollout/test_history.py::test_the_same_answers_told_again_leave_what_was_decoded_meanwhile"
ROWS = "rollout/test_recall.py::test_matches_are_those_of_a_search"
TRUSTED, UNREAD = "rollout/decoding/trust.py", "rollout/decoding/unread.py"
TRUST = "rollout/test_trust_in_history.py::test_trust_follows_overlaps_with_the_target"
BEST = "rollout/test_trust_in_history.py::test_history_is_mixed_in_where_overlaps_were_largest"
PUT_OFF = "rollout/test_unread.py::test_what_was_put_off_is_read_at_once[13-10]"
TOGETHER = "rollout/test_recall.py::test_rows_earn_a_pass_of_the_head_together"
PRIORS = "rollout/test_trust_in_history.py::test_longer_matches_and_more_followers_are_trusted_more"
RAGGED, PACKED = "bebop/model/ragged.py", "model/test_ragged.py"
SOURCE = "rollout/test_recall.py::test_what_was_said_before_is_drafted_and_counted_by_its_source"
EXACT = "rollout/test_history_exactness.py::test_the_output_distribution_is_the_target"
OVERLAP = "rollout/test_recall.py::test_the_overlap_of_the_head_alone_is_that_of_plain_drafts"
OF_ALONE, OF_MIXED = (f"{EXACT}[{system}-1.0-False-overlapping]" for system in ("history", "bebop_history"))
FREQUENT = "rollout/test_trust_in_history.py::test_drafts_are_drawn_as_often_as_tokens_followed"
OVERLAPS = "torch.minimum(out.probs[row, step, token].double(), chance)"
KNOWN = "test_past_answers.py::test_what_is_known_is_a_function_of_what_was_said_last"
DRIVER = "test_past_answers.py::test_the_driver_keeps_more_than_a_worker"
RESUMED = "test_past_answers.py::test_a_resumed_run_knows_what_it_knew"
SENT = "test_past_answers.py::test_workers_are_told_what_was_trained_on_before"

FAULTS = (
    fault("history/split-without-count", TEXTS, "self.link[there], self.count[there])", "self.link[there], 0)", GROWN),
    fault("history/link-not-split", TEXTS, "self.link[state] = self._alone(at, token)",
          "self.link[state] = self.follow[at][token]", GROWN),
    fault("history/one-suffix-counted", TEXTS, "            at = self.link[at]\n        self.tokens",
          "            at = ROOT\n        self.tokens", GROWN),
    fault("history/reader-not-settled", TEXTS, "while state != ROOT and matched <= self.length[self.link[state]]:",
          "while False:", READ),
    fault("history/match-as-long-as-its-state", TEXTS, "(after, matched + 1)", "(after, self.length[after])", READ),
    fault("history/bound-exceeded", TEXTS, "while self.tokens > self.limit:", "while self.tokens > self.limit + 1:",
          BOUND),
    fault("history/newest-goes", TEXTS, "self._drop(next(iter(self._held)))", "self._drop(next(reversed(self._held)))",
          OLDEST),
    fault("history/what-is-gone-still-counts", TEXTS, "if texts.held:", "if True:", TOLD),
    fault("history/told-again-starts-anew", TEXTS, "held.told == told", "False", TOLD),
    fault("history/match-of-another-row", RECALL, "self.of[slot] = copy(self.of[source])", "pass", ROWS),
    fault("history/match-shared-with-the-draft", RECALL, "return [copy(match) for match", "return [match for match",
          ROWS),
    fault("history/matches-kept-over-a-prefill", RECALL, "self.begun[span.first : span.first + rows] = False", "pass",
          "rollout/test_recall.py::test_rows_that_share_a_context_keep_their_own_prompts"),
    fault("history/followed-twice", RECALL, " and match.read == count:", ":", ROWS),
    fault("history/siblings-always", RECALL, "if self.siblings:\n            match.state = self.slots.history.extend",
          "if True:\n            match.state = self.slots.history.extend", f"{ROWS}[history-False]"),
    fault("history/trust-of-what-was-not-reached", RECALL,
          "reached = (step < emitted[row]).double()\n        after = (emitted[row] - step - 2).double()",
          "reached = torch.ones_like(step).double()\n        after = (emitted[row] - step - 2).double()", TRUST),
    fault("history/trust-without-the-target", RECALL, OVERLAPS, "chance", TRUST),
    fault("history/mean-without-history", RECALL, "both = both.index_put((row, step), more, accumulate=True)", "pass",
          TRUST),
    fault("history/worth-of-what-fell", RECALL, "stood, after = (after >= 0).double(), after.clamp_min(0)",
          "stood, after = (after >= -1).double(), after.clamp_min(0)", TRUST),
    fault("history/least-overlap", TRUSTED, "best, which = overlaps.max(-1)", "best, which = overlaps.min(-1)", BEST),
    fault("history/worth-a-token-alone", TRUSTED, "worth = 1 + sums[..., 6].sum(-1) / sums[..., 5].sum(-1)",
          "worth = torch.ones_like(sums[..., 0, 0])", BEST),
    fault("history/every-prompt-learns", TRUSTED, "rows.setdefault(id(one), []).append(row)",
          "rows.setdefault(id(texts[0]), []).append(row)",
          "rollout/test_trust_in_history.py::test_rows_of_a_prompt_learn_together_where_siblings_count"),
    fault("unread/no-room", UNREAD, "return self.most + width > self.room", "return False", PUT_OFF),
    fault("unread/of-rows-that-are-not-behind", "rollout/decoding/head.py", "torch.where(behind[:, None] > 0, states",
          "torch.where(behind[:, None] > -1, states", PUT_OFF),
    fault("unread/tokens-before", UNREAD, "(entries + 1 - slots.asked", "(entries - slots.asked", PUT_OFF),
    fault("unread/parked-as-it-is", UNREAD, "        self.settle(slot)\n", "",
          "rollout/test_unread.py::test_what_is_parked_has_been_read"),
    fault("history/mixture-for-the-head", "rollout/decoding/draft_verify.py", "torch.minimum(probs[:, 0], draft.head)",
          "torch.minimum(probs[:, 0], draft.probs[:, 0])", OVERLAP),
    fault("history/head-of-a-later-draft", MIXED, "head.probs[:, 0]", "head.probs[:, -1]", OVERLAP),
    fault("history/head-measured-unasked", "rollout/decoding/draft_verify.py",
          "_of_head(draft, out.probs) if self.measure else {}", "_of_head(draft, out.probs)", OVERLAP),
    fault("history/source-not-counted", "rollout/decoding/draft_verify.py", "share * kept for name", "share for name",
          "benchmarks/test_history.py::test_lookups_and_arms_are_measured"),
    fault("history/counts-as-probabilities", MATCHING, "tuple(c / total for _, c in found)",
          "tuple(1 / len(found) for _ in found)", FREQUENT),
    fault("history/drawn-flatter-than-reported", MATCHING, "sums = accumulate(self.chances)",
          "sums = accumulate([1 / len(self.chances)] * len(self.chances))", OF_ALONE),
    fault("history/weights-of-the-head-alone", MIXED, "mixed = own * torch.tensor([1 - share for share in shares],",
          "mixed = own * torch.tensor([1.0 for share in shares],",
          "rollout/test_history_exactness.py::test_the_output_distribution_of_mixtures_is_the_target[overlapping]"),
    fault("history/tail-over-the-head", MIXED, "row, step, line.match, line.trusted.alone",
          "row, 0, line.match, line.trusted.alone", OF_MIXED),
    fault("history/head-left-in", MIXED, "wanted = [gain > line.pace * cost for", "wanted = [True for",
          "rollout/test_recall.py::test_the_head_is_left_out_once_history_is_sure"),
    fault("history/head-for-one-row", MIXED, "if self.recall.siblings and sum(gains)", "if False and sum(gains)",
          f"{TOGETHER}[True-headed0]"),
    fault("history/stands-as-much-as-it-is-meant", RECALL, OVERLAPS, "out.probs[row, step, token].double()", TRUST),
    fault("history/several-like-one", TRUSTED, "share[:, -1] *= SEVERAL", "pass", PRIORS),
    fault("history/shorter-match-as-long", MATCHING, "                matched = length[state]\n", "", LOOP),
    fault("history/single-one-counted-twice", MATCHING, "min(count[there], KINDS - 1) - 1",
          "min(count[there], KINDS - 1)", LOOP),
    fault("history/drawn-where-the-match-was", MATCHING, "state, matched, step = there, matched + 1, step + 1",
          "state, matched, step = there, matched, step + 1", LOOP),
    fault("history/several-told-apart-by-counts", MATCHING, "for _, c in found), length + KINDS - 1)",
          "for _, c in found), length + min(total, KINDS - 1) - 1)", PRIORS),
    fault("history/state-of-another-row", "rollout/decoding/head.py", "states[0, lengths.cumsum(0) - 1]",
          "states[0, lengths - 1]", PUT_OFF),
    fault("history/padding-of-the-row-before", RAGGED, "starts = (lengths.cumsum(0) - lengths)[:, None]",
          "starts = (lengths.cumsum(0) - 1)[:, None]", f"{PACKED}::test_rows_go_end_to_end_and_back"),
    fault("history/sampled-as-the-first-rows", "rollout/decoding/draft_verify.py", "rows.sampling.of(ragged.rows)",
          "rows.sampling.of(0 * ragged.rows)", f"{PACKED}::test_each_row_keeps_its_own_sampling"),
    fault("history/end-to-end-at-positions-of-padding", "bebop/model/lean.py",
          "positions = positions[0]", "positions = positions[0].flip(0)",
          f"{PACKED}::test_verification_end_to_end_is_that_of_padded_rows[True]"),
    fault("history/limit-ignored", ALONE, "[length.limit] * rows.batch", "[99] * rows.batch", SOURCE),
    fault("history/past-oldest-first", PAST, "[-self.answers :]", "[: self.answers]", KNOWN),
    fault("history/past-unbounded", PAST, "while self.tokens > self.limit:", "while False:", KNOWN),
    fault("history/recall-one-step-short", PAST, "range(step, step + 1)", "range(step, step)", RESUMED),
    fault("history/recall-stops-early", PAST, "0 and tokens <= self.limit:", "0 and tokens <= self.limit // 2:",
          RESUMED),
    fault("history/bound-of-the-workers", PAST, "cls(options.past_tokens, ", "cls(options.tokens, ", DRIVER),
    fault("history/nothing-sent", "bebop/pool.py", "members=members, past=past)", "members=members)", SENT),
    fault("history/not-told", "rollout/worker.py", "            if a.past:", "            if False:",
          "rollout/test_worker.py::test_an_engine_knows_past_answers_before_it_begins_with_their_prompt"),
    fault("history/nothing-taken", "bebop/loop.py", "self.past.take(batch.groups)", "pass", SENT),
)  # fmt: skip
