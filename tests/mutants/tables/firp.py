"""Faults in pseudo states on the engine: what is drafted from them, which are kept, what is counted, which tree."""

from tests.mutants.fault import fault

DRAFTER, SHAPES, CYCLE = "rollout/decoding/drafters/firp.py", "bebop/tree_shape.py", "rollout/decoding/draft_verify.py"
FORETOLD = "rollout/test_firp_tree.py::test_cycles_are_those_that_ranks_foretell"
DRAFTED = "rollout/test_firp_tree.py::test_siblings_differ_and_are_of_the_state_of_their_depth"
GREEDY = "rollout/test_firp_tree.py::test_greedy_answers_are_those_of_plain_decoding"
OWN = "rollout/test_firp_tree.py::test_a_part_may_bring_its_own_chances"
PATHS = "rollout/test_firp_passes.py::test_a_node_and_its_pseudo_states_see_their_own_way"
KEPT = "rollout/test_firp_passes.py::test_kept_states_and_cache_are_those_of_a_pass_over_the_text"
LIKELIEST = "rollout/test_firp_passes.py::test_nodes_off_the_likeliest_paths_have_no_pseudo_states"
CHOSEN = "rollout/test_firp_passes.py::test_the_likeliest_paths_are_kept"
COUNTED = "rollout/test_firp_passes.py::test_extra_positions_are_those_beside_tokens_and_drafts_that_count"
BEST = "test_tree_shape.py::test_no_tree_of_so_many_nodes_keeps_more"

FAULTS = (
    fault("firp/siblings-drawn-again", DRAFTER, "chosen[..., None], -torch.inf)", "chosen[..., None], 0.0)", FORETOLD),
    fault("firp/probs-of-the-first-child", DRAFTER, "probs[shape.ranks, :,", "probs[0 * shape.ranks, :,", DRAFTED),
    fault(
        "firp/step-of-another-depth", DRAFTER, "logits[:, depths], None if", "logits[:, 0 * depths], None if", DRAFTED
    ),
    fault("firp/states-of-the-newest-token", DRAFTER, "emitted - 1]", "0 * emitted]", KEPT),
    fault("firp/plain-step-forgotten", DRAFTER, "torch.where(plain, 0, wanted)", "wanted", COUNTED),
    fault("firp/plain-steps-the-wrong-way", DRAFTER, "~last.flatten(1).any(1)", "last.flatten(1).any(1)", LIKELIEST),
    fault(
        "firp/left-out-rows-shift",
        DRAFTER,
        "states[:, self.chosen] = made",
        "states[:, : made.shape[1]] = made",
        LIKELIEST,
    ),
    fault("firp/choice-outlives-its-pass", DRAFTER, "self.target_pass.chosen = None", "pass", GREEDY),
    fault("firp/left-out-rows-count", DRAFTER, "* (row in chosen)", "* 1", COUNTED),
    fault(
        "firp/drafts-that-do-not-count",
        CYCLE,
        "draft.lengths[:, None], each, 0)",
        "draft.lengths[:, None], each, each)",
        COUNTED,
    ),
    fault(
        "firp/newest-token-uncounted",
        CYCLE,
        "<= draft.lengths[:, None], each",
        "< draft.lengths[:, None], each",
        COUNTED,
    ),
    fault(
        "firp/output-by-row",
        "rollout/decoding/base.py",
        "extra=None if self.extra is None else _take(self.extra, rows)",
        "extra=self.extra",
        KEPT,
    ),
    fault(
        "firp/other-anchors-seen",
        "bebop/model/firp.py",
        "return earlier & (anchor == anchor[:, None])",
        "return earlier",
        PATHS,
    ),
    fault("firp/chances-of-the-depth-above", SHAPES, "chance * below[0]", "chance * own[0]", BEST),
    fault("firp/siblings-for-nothing", SHAPES, "chance / own[path[-1]] * own[path[-1] + 1]", "chance", BEST),
    fault("firp/unlikeliest-paths", SHAPES, "leaves[:paths]", "leaves[-paths:]", CHOSEN),
    fault("firp/chances-of-the-part-unread", "bebop/options.py", "self.chances or known or", "self.chances or", OWN),
    fault(
        "firp/nodes-for-steps",
        "bebop/config_decoding.py",
        "max(map(len, options.paths(self.limit)))",
        "self.limit",
        "trainer/test_probe_set.py::test_a_tree_is_swept_as_deep_as_it_goes",
    ),
)
