"""Decisions about all pods of one job: which of them count, and what their sidecars say together."""
