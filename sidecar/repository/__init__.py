"""Commits and manifests in the store: their only reader, for uploads, downloads, retention, API and commands."""
