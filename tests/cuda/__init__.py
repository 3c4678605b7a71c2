"""What a GPU can do otherwise than a CPU: random numbers of its own, copies beside training. ``make test-cuda`` runs it."""
