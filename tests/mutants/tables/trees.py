"""Faults in trees of drafts: verification, attention, what is kept of an accepted path."""

from tests.mutants.fault import fault

KERNEL, BASE = "kernels/tree_verify.py", "rollout/decoding/base.py"
DRAFTER, TARGET = "rollout/decoding/drafters/mtp_tree.py", "rollout/target.py"
OUTPUT = "kernels/test_tree_verify.py::test_the_output_distribution_is_the_target"
PAPERS = "kernels/test_tree_verify.py::test_it_decides_as_the_papers_do"
CHAIN = "rollout/test_tree.py::test_a_chain_as_a_tree_is_the_chain_to_the_bit"
CACHES = "rollout/test_tree_caches.py::test_after_a_path_the_caches_are_those_of_the_context"
PATHS = "rollout/test_tree_caches.py::test_tree_attention_is_every_path_by_itself"
DRAFTED = "rollout/test_tree_caches.py::test_siblings_differ_and_the_draft_is_of_its_own_way"
MEASURED = "rollout/test_tree.py::test_what_is_measured_is_the_first_child"
GREEDY = "rollout/test_tree.py::test_greedy_answers_are_those_of_plain_decoding"

FAULTS = (
    fault("trees/residual-kept", KERNEL, "torch.where(failed[:, None], left, probs)", "probs", OUTPUT),
    fault("trees/residual-not-normalised", KERNEL, "torch.where(failed, left.sum(-1), mass)", "mass", OUTPUT),
    fault("trees/any-parent", KERNEL, "here = parents[:, node] == last", "here = parents[:, node] <= last", OUTPUT),
    fault("trees/target-of-the-node-before", KERNEL, "target_probs[:, node + 1]", "target_probs[:, node]", OUTPUT),
    fault(
        "trees/test-inclusive",
        KERNEL,
        "q * mass < probs",
        "q * mass <= probs",
        "kernels/test_tree_verify.py::test_rounding_never_yields_a_token_without_mass",
    ),
    fault("trees/greedy-residual-keeps-the-draft", KERNEL, "probs.scatter(-1, index, 0.0)", "probs", OUTPUT),
    fault("trees/one-test-for-all", KERNEL, "uniforms[:, node] * q", "uniforms[:, 0] * q", OUTPUT),
    fault("trees/path-one-early", KERNEL, "path[row, accepted] = last + 1", "path[row, accepted] = last", PAPERS),
    fault("trees/tried-late", KERNEL, "tried[row, accepted] += here", "tried[row, accepted] += passed", PAPERS),
    fault(
        "trees/lengths-ignored",
        KERNEL,
        "here = here & (node < lengths)",
        "pass",
        "kernels/test_tree_verify.py::test_a_chain_is_chain_verification_to_the_bit",
    ),
    fault(
        "trees/ways-too-short",
        "kernels/trees.py",
        "max(nodes - 1, 1).bit_length() - 1",
        "1",
        "kernels/test_trees.py::test_a_deep_chain_has_all_before_it",
    ),
    fault("trees/position-by-node", TARGET, "rows.fed[:, None] + ways.sum(-1) - 1, layers", "entries, layers", PATHS),
    fault("trees/root-unseen", TARGET, "ways[:, :, 0] = True", "ways[:, 0, 0] = True", PATHS),
    fault(
        "trees/not-compacted",
        "rollout/decoding/draft_verify.py",
        "self.target.keep(rows, accepted.rows)",
        "pass",
        CACHES,
    ),
    fault(
        "trees/values-not-compacted",
        "bebop/model/attention.py",
        "for store in (self.keys[:, :batch], self.values[:, :batch])",
        "for store in (self.keys[:, :batch],)",
        CACHES,
    ),
    fault(
        "trees/output-by-node",
        "rollout/decoding/draft_verify.py",
        "out.at(accepted.rows)",
        "out.at(torch.arange(accepted.rows.shape[1]).expand_as(accepted.rows))",
        CACHES,
        GREEDY,
    ),
    fault(
        "trees/last-child-for-first",
        BASE,
        "first = child.int().argmax(-1)",
        "first = child.long().cumsum(-1).argmax(-1)",
        MEASURED,
    ),
    fault("trees/leaf-goes-on", BASE, "lengths=accepted.lengths + goes_on", "lengths=accepted.lengths + 1", MEASURED),
    fault(
        "trees/penalty-of-all-nodes",
        "rollout/decoding/emit.py",
        "(ways.float() @ drafted > 0)",
        "(torch.ones_like(ways.float()) @ drafted > 0)",
        "rollout/test_tree.py::test_penalties_see_the_way_to_a_node_and_no_other",
    ),
    fault("trees/siblings-drawn-again", DRAFTER, "logits.new_tensor(-torch.inf)", "logits.new_tensor(0.0)", DRAFTED),
    fault(
        "trees/draft-sees-all-nodes",
        DRAFTER,
        "ways = self.tree.ways[level.inner]",
        "ways = torch.ones_like(self.tree.ways[level.inner])",
        DRAFTED,
    ),
    fault(
        "trees/draft-position-by-node",
        DRAFTER,
        "(rows.fed + depth)[:, None].expand_as(tokens)",
        "rows.fed[:, None] + level.inner",
        DRAFTED,
    ),
    fault(
        "trees/state-of-another-parent",
        DRAFTER,
        "drawn, hidden[:, level.above])",
        "drawn, hidden[:, 0 * level.above])",
        DRAFTED,
    ),
    fault("trees/draft-order", DRAFTER, "torch.cat(probs, 1)[:, tree.order]", "torch.cat(probs, 1)", DRAFTED),
)
