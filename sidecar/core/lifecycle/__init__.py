"""Decisions about a pod's life: phases, checkpoint states, risk, notices, prefix ownership."""
