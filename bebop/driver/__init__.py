"""The asynchronous loop: buffer, worker pool and weights; it knows neither Ray nor an engine."""
