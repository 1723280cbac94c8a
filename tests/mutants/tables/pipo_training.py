"""Faults in the training of networks of pairs: labels, splits, the teacher's places, gradients, what is kept."""

from tests.mutants.fault import fault

ROWS, LOSS, MODEL, JOB = "trainer/pipo_rows.py", "trainer/pipo_loss.py", "bebop/model/pipo.py", "trainer/pipo.py"
TESTS, NETWORK, TRAINED = "trainer/test_pipo.py::", "model/test_pipo.py::", "adaptation/test_pipo.py::"
LABELS = TESTS + "test_labels_are_tokens_of_the_answer_and_no_pads"
SPLIT = TESTS + "test_a_split_changes_no_text_and_puts_pads_second"
TEACHER = TESTS + "test_the_teacher_reads_the_text_without_pads_and_answers_at_each_place"
NEVER = TESTS + "test_tokens_that_are_never_drawn_count_nothing"
GRADIENT = TESTS + "test_the_score_function_has_the_gradient_of_the_divergence_and_the_naive_estimate_none"
SEES = NETWORK + "test_states_depend_on_the_pairs_before_and_drafts_on_the_first_token"

FAULTS = (
    fault("pipo_training/no-residual", MODEL, 'first + second + x if self.kind == "mlp" else x', "x",
          NETWORK + "test_a_compressor_begins_as_the_sum_unless_it_is_an_ablation"),
    fault("pipo_training/mtp-of-second-tokens", MODEL, "embeddings[:, 1:, 0], h", "embeddings[:, 1:, 1], h", SEES),
    fault("pipo_training/reads-the-pair-it-predicts", MODEL, "self.compress(embeddings[:, :-1])",
          "self.compress(embeddings[:, 1:])", SEES),
    fault("pipo_training/confidence-trains-states", MODEL, "one.detach() for one in seen", "one for one in seen",
          NETWORK + "test_the_confidence_head_trains_itself_alone"),
    fault("pipo_training/pads-as-labels", ROWS, "self.answer[:, 1:] & (self.pairs[:, 1:, 1] != self.pad)",
          "self.answer[:, 1:]", LABELS),
    fault("pipo_training/prompt-as-labels", ROWS, "(places >= starts) & (places < ends)", "places < ends", LABELS),
    fault("pipo_training/kept-drafts-alone", ROWS, "self.answer[:, 1:] & (self.drafts[:, 1:] != self.pad)",
          "self.seconds & (self.drafts[:, 1:] != self.pad)", LABELS),
    fault("pipo_training/split-loses-a-token", ROWS, "at += 1 if alone else 2", "at += 2", SPLIT),
    fault("pipo_training/pad-stands-for-the-next", ROWS, "(real.long().cumsum(1) - 1).clamp_min(0)",
          "real.long().cumsum(1).clamp_max(flat.shape[1] - 1)", TEACHER),
    fault("pipo_training/teacher-reads-pads", ROWS, "flat.gather(1, order)", "flat", TEACHER),
    fault("pipo_training/naive-gradient", LOSS, "(gap - others) * student.gather(-1, drawn[..., None])[..., 0]",
          "(student - teacher).gather(-1, drawn[..., None])[..., 0]", GRADIENT),
    fault("pipo_training/baseline-of-itself", LOSS,
          "(gap.sum() - gap) / max(1, gap.numel() - 1)", "gap.mean()", GRADIENT),
    fault("pipo_training/counts-what-is-never-drawn", LOSS,
          "(student - teacher).masked_fill(never, 0)", "(student - teacher)",
          NEVER),
    fault("pipo_training/top-k-not-renormalised", LOSS,
          'x.masked_fill(left_out, float("-inf")).log_softmax(-1) for x',
          'x.masked_fill(left_out, float("-inf")) for x',
          TESTS + "test_top_k_over_all_tokens_is_the_divergence_and_over_few_counts_each_once"),
    fault("pipo_training/acceptance-above-one", LOSS, "ratio.detach().exp().clamp_max(1.0)", "ratio.detach().exp()",
          TESTS + "test_a_student_that_is_the_teacher_is_accepted_for_certain"),
    fault("pipo_training/wrong-answers-kept", JOB, "answer.text, prompt) >= 1 for", "answer.text, prompt) >= 0 for",
          TRAINED + "test_right_answers_are_kept_and_no_question_is_held_out"),
    fault("pipo_training/held-out-questions-trained-on", JOB, "if prompt.token_ids not in known", "if True",
          TRAINED + "test_a_question_that_is_held_out_is_not_trained_on"),
    fault("pipo_training/rollouts-drawn-again", JOB, "if self.config.resume and path.is_file():\n            lines",
          "if False:\n            lines", TRAINED + "test_a_resumed_training_is_an_uninterrupted_one_to_the_bit[opd]"),
)  # fmt: skip
