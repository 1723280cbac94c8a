"""PAD inside RL: log-probs of the distribution that was really emitted, against none, on the built-in model."""
