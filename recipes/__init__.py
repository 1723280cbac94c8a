"""Recipes: programs built with bebop, and the studies that measured its numbers."""
