"""The mutating admission webhook: ``inject`` for pods as they are created."""
