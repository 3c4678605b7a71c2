"""From the volume to the store: newest first, in pieces over one stream, committed when it is all there."""
