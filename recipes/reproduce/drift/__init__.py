"""Study of acceptance while RL changes the policy: Figs 2, 3, 6, 8, 9a and 11 of the paper, on the built-in model."""
