"""Draft trees of the MTP head against chains with as many drafts, on the built-in model."""
