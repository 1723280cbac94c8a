"""Drafts from past completions in a job of several epochs: accept length and speed by epoch, as the policy learns."""
