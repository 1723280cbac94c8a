"""Hydra configuration of bebop (a package, so that `pkg://bebop.conf` finds it)."""
