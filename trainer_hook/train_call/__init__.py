"""The life of one ``train()`` call: resume, steps, saves, termination, end. Written once, for every library."""
