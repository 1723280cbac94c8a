"""Sampled against greedy drafts on SmolLM2-135M-Instruct: claim C2, the boundary, draft temperature, top-p rollouts."""
