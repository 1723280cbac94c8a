"""Study of BlockPilot's claims on the built-in model: block-diffusion drafts, and a block size for each prompt."""
