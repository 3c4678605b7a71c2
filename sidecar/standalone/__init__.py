"""What a person does with a store without a sidecar: list, pull, push, remove, prune; by the sidecar's readers and jobs."""
