"""Ray runtime of a job: actors, sessions, watchdog and the checks before the start."""
