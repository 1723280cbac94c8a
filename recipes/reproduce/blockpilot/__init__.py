"""Block-diffusion drafts and a block size for each prompt: the claims of BlockPilot, on the built-in model."""
