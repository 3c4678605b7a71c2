"""What happens to the pod and to the run: termination, spot notices, save requests, the lease on the prefix."""
