"""``make demo``: a training run loses its pod and its volume, and ends as if nothing had happened."""
