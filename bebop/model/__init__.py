"""Models: Hugging Face backbones, the MTP head, checkpoints and the built-in model."""
