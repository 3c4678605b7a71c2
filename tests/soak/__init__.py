"""A long run that looks for growth: of memory, descriptors, threads, watches, files, and of the cost of a commit."""
