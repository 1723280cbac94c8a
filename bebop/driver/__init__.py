"""The asynchronous loop: buffer, worker pool and weights, independent of Ray and of any engine."""
