"""Commands on a store without a sidecar: list, pull, push, remove, prune. They use the readers and jobs of the sidecar."""
