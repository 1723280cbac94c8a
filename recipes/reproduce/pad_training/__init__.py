"""PAD inside RL on the built-in model: log-probs of the distribution that emitted the tokens, against no weights."""
