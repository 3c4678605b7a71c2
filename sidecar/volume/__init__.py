"""The shared volume: what is on it, holding files there, hearing of changes, publishing files whole."""
