"""What the recipes that reproduce findings share: sequences, heads, figures, records."""
