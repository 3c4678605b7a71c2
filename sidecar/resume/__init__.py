"""From the store to the volume: which checkpoint, its files verified, published whole."""
