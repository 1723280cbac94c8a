"""Study of where sampled drafts beat greedy ones, token by token: Fig 13 of the paper, on the built-in model."""
