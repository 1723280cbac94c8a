"""Study of all decoding systems side by side: speed against total variation to the target and against correctness."""
