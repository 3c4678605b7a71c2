"""Order of uploads: the queue, the dispatcher of work items, and the plan of a flush."""
