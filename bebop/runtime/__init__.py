"""A job in Ray's processes: actors, sessions, watchdog and what is checked before the start."""
