"""RL post-training whose rollouts run on speculative decoding that stays fast while the policy explores."""

__version__ = "0.1.0"
