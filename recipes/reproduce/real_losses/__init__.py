"""Claim C3 on SmolLM2-135M-Instruct: which loss makes a head draft best, when, and how entropy affects it."""
