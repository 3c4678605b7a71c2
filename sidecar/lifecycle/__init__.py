"""Life of the pod and of the run: termination, spot notices, save requests, risk, the lease of the prefix."""
