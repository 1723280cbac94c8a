"""Faults in the training of pseudo states: what they see of text that was read before, ranks, cycles, baselines."""

from tests.mutants.fault import fault

TEXT, RANKS = "bebop/model/firp_text.py", "trainer/firp_ranks.py"
MEASURES = "recipes/reproduce/firp/measures.py"
STATES = "model/test_firp_text.py::test_states_are_those_of_one_pass"
GRADIENTS = "model/test_firp_text.py::test_gradients_are_those_of_one_pass"
CYCLES = "trainer/test_firp_ranks.py::test_cycles_are_those_of_a_decoder"
ACCEPTED = "recipes/reproduce/test_firp.py::test_accepted_drafts_are_those_of_rejection_sampling_in_the_mean"

FAULTS = (
    fault(
        "firp-training/sees-one-more", TEXT, "places > anchors[..., None]", "places > anchors[..., None] + 1", STATES
    ),
    fault("firp-training/always-masked", TEXT, "if self.masked else earlier", "if True else earlier", STATES),
    fault("firp-training/position-of-the-anchor", TEXT, "anchors + step + 1\n", "anchors\n", STATES),
    fault(
        "firp-training/no-gradient-into-earlier",
        TEXT,
        "key[:, :, None], value",
        "key[:, :, None].detach(), value",
        GRADIENTS,
    ),
    fault("firp-training/anchor-late", RANKS, "len(row.prompt) - 2", "len(row.prompt) - 1", CYCLES),
    fault("firp-training/no-bonus", RANKS, "place += 1 + reached(shape, ranks[place])", "place += 1", CYCLES),
    fault("firp-training/prefix-not-weighted", MEASURES, "(before * overlap)", "(overlap)", ACCEPTED),
    fault(
        "firp-training/prefix-of-the-step-itself",
        MEASURES,
        "stands.cumprod(-1)[..., :-1]",
        "stands.cumprod(-1)[..., 1:]",
        ACCEPTED,
    ),
)
