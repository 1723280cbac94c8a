"""Faults in what a job's certificate looks at, since when it counts, and what follows from it."""

from tests.mutants.fault import fault

TRAINER, ROWS, MONITOR = "trainer/test_certify.py", "trainer/test_certify_rows.py", "monitor/test_certified.py"
CERTIFY, CERTIFIED = "trainer/certify.py", "bebop/monitor/certified.py"

FAULTS = (
    fault(
        "certify-training/kept-contexts",
        CERTIFY,
        "(own == completion.oldest) & np.isin",
        "np.isin",
        f"{TRAINER}::test_tokens_of_one_version_that_is_at_hand",
        f"{TRAINER}::test_each_token_is_held_against_the_weights_that_wrote_it",
    ),
    fault(
        "certify-training/weights-of-now-for-all",
        CERTIFY,
        "parts = self.past.visit(older, lambda v: self._score(answers, places, v))",
        "parts = [self._score(answers, places, v) for v in older]",
        f"{TRAINER}::test_each_token_is_held_against_the_weights_that_wrote_it",
    ),
    fault(
        "certify-training/evidence-goes-on",
        CERTIFY,
        "if since > self.since:",
        "if since < self.since:",
        f"{TRAINER}::test_evidence_begins_again_where_it_has_to",
    ),
    fault(
        "certify-training/inexact-answers",
        CERTIFY,
        "if not all(t.completion.exact",
        "if not any(t.completion.exact",
        f"{TRAINER}::test_answers_of_an_inexact_system_are_not_weighed",
    ),
    fault(
        "certify-training/not-in-the-checkpoint",
        "trainer/rank.py",
        'self.certifier.load_state_dict(saved.trainer["certificate"])',
        "pass",
        f"{TRAINER}::test_a_checkpoint_holds_the_evidence",
    ),
    fault(
        "certify-training/last-column-never-seen",
        "trainer/certify_rows.py",
        "one.probs.shape[1] if one.ids is None else int(one.ids.max()) + 1",
        "one.probs.shape[1] if one.ids is None else int(one.ids.max())",
        ROWS,
    ),
    fault(
        "certify-training/seen-a-place-early",
        "trainer/certify_rows.py",
        "return first < one.places[:, None]",
        "return first <= one.places[:, None]",
        ROWS,
    ),
    fault(
        "certify-training/columns-without-the-row-before",
        "trainer/certify_rows.py",
        "rank = torch.stack(list(tables)).amax(0)",
        "rank = tables[0].clone()",
        ROWS,
    ),
    fault(
        "certify-training/rest-is-lost",
        "trainer/certify_rows.py",
        "(1 - own.sum(1, keepdim=True)).clamp_min(0)",
        "torch.zeros_like(own[:, :1])",
        ROWS,
    ),
    fault(
        "certify-training/best-of-a-group",
        CERTIFIED,
        "trajectories=group.trajectories[:2])",
        "trajectories=tuple(sorted(group.trajectories, key=lambda t: -t.reward))[:2])",
        f"{MONITOR}::test_the_first_two_answers_of_prompts_spaced_evenly",
    ),
    fault(
        "certify-training/around-deaths",
        "bebop/pool.py",
        "self.disturbed = self.buffer.admitted",
        "self.disturbed = 0",
        "test_loop_certify.py::test_prompts_that_were_out_when_a_worker_died_are_not",
    ),
    fault(
        "certify-training/after-a-resume",
        "bebop/pool.py",
        "self.disturbed = self.buffer.limit - self.config.trainer.groups_per_step",
        "self.disturbed = self.buffer.taken",
        "test_loop_certify.py::test_nor_those_that_were_out_when_the_checkpoint_was_written",
    ),
    fault(
        "certify-training/answers-in-flight-count",
        CERTIFIED,
        "self.since, self._told = step + self.staleness + 1, False",
        "self.since, self._told = step + 1, False",
        f"{MONITOR}::test_evidence_begins_again_with_answers_of_the_weights_that_were_sent",
    ),
    fault(
        "certify-training/fell-back",
        CERTIFIED,
        "return self.highest >= self.limit",
        "return self.log_e >= self.limit",
        f"{MONITOR}::test_metrics_and_the_log_s_row",
    ),
    fault(
        "certify-training/sends-weights-for-ever",
        "bebop/monitor/controller.py",
        "            self._sent_again = True\n",
        "            self._sent_again = False\n",
        f"{MONITOR}::test_a_failed_certificate_is_broken_and_the_weights_are_sent_again_once",
    ),
    fault(
        "certify-training/complaint-is-forgotten",
        "bebop/monitor/controller.py",
        "self._uncertified = signals.uncertified or self._uncertified",
        "self._uncertified = signals.uncertified",
        f"{MONITOR}::test_a_failed_certificate_is_broken_and_the_weights_are_sent_again_once",
    ),
)
