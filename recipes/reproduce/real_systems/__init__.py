"""Study of four other systems on SmolLM2-135M-Instruct: FIRP, PAD, BlockPilot and PIPO, trained and measured."""
