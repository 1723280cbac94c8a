"""PIPO: reads and emits pairs of tokens, with a network trained on completions of the built-in model."""
