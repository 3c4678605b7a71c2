"""What a run will need: storage, save interval, grace period, cost. What may enter: arithmetic on given numbers."""
