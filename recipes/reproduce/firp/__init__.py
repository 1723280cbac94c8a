"""Pseudo hidden states of future tokens inside the backbone: the claims of FIRP, on the built-in model."""
