"""Decisions about time: order, flush plans, concurrency, hedging, part sizes."""
