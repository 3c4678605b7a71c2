"""The mutating admission webhook: what ``inject`` does to a file, done to a pod when it is created."""
