"""Whole pods on a simulated clock: the production daemon, a volume on tmpfs, one store in memory behind a bad network."""
