"""Files on the shared volume: the marker that completes a checkpoint, a rank's lease."""
