"""Decisions about committed checkpoints: commit, rewrite, resume, retention."""
