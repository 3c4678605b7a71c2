"""Files on the shared volume: checkpoint folders with their markers, leases and records of ranks. Knows no training library."""
