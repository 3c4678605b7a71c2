"""Activation of the hook: the run command, the start of every Python process below it, patches on import."""
