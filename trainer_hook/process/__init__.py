"""What a training process holds for its life: settings, session, signals, agreement with other ranks, the sidecar's client."""
