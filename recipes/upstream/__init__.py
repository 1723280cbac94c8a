"""Defects found in what Bebop builds on: a function each that says whether the installed version still has it."""
