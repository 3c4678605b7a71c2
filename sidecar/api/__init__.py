"""The local HTTP API (FORMAT.md, "API")."""
