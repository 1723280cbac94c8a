"""Five minutes of adaptation by each of four losses, with little and with more data."""
