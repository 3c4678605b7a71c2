"""Downloads: choice of the checkpoint to resume from, verified files, atomic publication on the volume."""
