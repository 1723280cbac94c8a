"""A job in virtual time: the real loop, pool, buffer and monitor over simulated engines and a simulated trainer."""
