"""Training an MTP head before RL: sequences in, a better head and its card out."""
