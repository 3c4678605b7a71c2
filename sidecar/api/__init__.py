"""The local HTTP API (FORMAT.md, "API"): routes, their models, the metrics, and the live page."""
