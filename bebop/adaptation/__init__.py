"""Training of an MTP head before RL: it takes sequences and produces a better head and its model card."""
