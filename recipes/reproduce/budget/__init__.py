"""Study of a budget of five minutes: adaptation by each of four losses, with little and with more data."""
