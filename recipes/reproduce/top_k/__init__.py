"""Total variation on the K largest draft logits alone, against the whole vocabulary (Fig 14b)."""
