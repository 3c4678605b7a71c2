"""Decisions. Nothing here knows a file, a socket, a clock, asyncio or a log: values in, values out."""
