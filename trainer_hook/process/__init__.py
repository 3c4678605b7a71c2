"""State of one training process: settings, session, signals, consensus with other ranks, client of the sidecar."""
