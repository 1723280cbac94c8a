"""Recipes: what is built with bebop, and how its numbers were made."""
