"""Committed checkpoints in the store: the one reader of their commits and manifests."""
