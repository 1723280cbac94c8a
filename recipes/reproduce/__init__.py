"""Shared code of the recipes that reproduce findings: sequences, heads, rules, records, figures and pages."""
