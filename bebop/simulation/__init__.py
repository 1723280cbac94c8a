"""Simulation of a job in virtual time: the real loop, pool, buffer and monitor with simulated engines and trainer."""
