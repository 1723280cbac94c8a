"""A job in Ray's processes: actors, sessions, watchdog and the checks before the start."""
