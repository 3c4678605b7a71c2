"""How the hook comes into a process: the launcher, the start of every Python below it, the imports that it waits for."""
