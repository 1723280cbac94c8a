"""Study of losses for MTP heads: Table 2 and Figs 4, 5, 1b, 10 of the paper, on the built-in model."""
