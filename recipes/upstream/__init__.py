"""Defects found in Bebop's dependencies: one function each checks if the installed version still has the defect."""
