"""PIPO: pairs of tokens in and out, by a network that is trained on answers of the built-in model."""
