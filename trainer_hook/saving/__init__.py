"""When a step is saved, whether there is room for it, and what makes a checkpoint of the files, whoever writes them."""
