"""Faults in how verl is given trajectories of our environments: masks, losses, what ends them."""

from tests.mutants.fault import fault

LOOP = "recipes/verl/environment_loop.py"
TESTS = "recipes/verl/test_environment_loop.py::"
MASK = f"{TESTS}test_the_mask_says_what_the_policy_wrote"
LOST = f"{TESTS}test_what_is_lost_begins_again_and_is_no_row_in_the_end"

FAULTS = (
    fault("verl-loop/observation-trained", LOOP, "self.mask += [0] * len(ids)", "self.mask += [1] * len(ids)", MASK),
    fault("verl-loop/log-probs-beside-their-tokens", LOOP, "self.logprobs += [0.0] * len(ids)", "pass", MASK),
    fault("verl-loop/separator-dropped", LOOP, "played.read(heard)", "played.read(heard[1:])", MASK),
    fault("verl-loop/lost-is-a-row-of-0", LOOP, "                await episode.close()\n        return None",
          "                await episode.close()\n        return Played(prompt=[1])", LOST),
    fault("verl-loop/goes-on-with-what-was-written", LOOP, "played = Played(prompt=first)",
          "played = self.__dict__.setdefault('kept', Played(prompt=first))", LOST),
    fault("verl-loop/goes-on-after-a-cut", LOOP, "if not ids or ids[-1] not in self.stops:", "if not ids:",
          f"{TESTS}test_budgets[length]"),
    fault("verl-loop/one-turn-more", LOOP, "played.turns >= self.limits.max_turns",
          "played.turns > self.limits.max_turns", f"{TESTS}test_budgets[turns]"),
)  # fmt: skip
