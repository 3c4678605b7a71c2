"""The shared volume: access to its files, pins by hard links, change notifications, atomic publication."""
