"""Files on the shared volume: the marker that ends a checkpoint, a rank's lease."""
