"""Requests to the store in worker threads: retries, the rate limit, the health of the store. Knows no checkpoints."""
