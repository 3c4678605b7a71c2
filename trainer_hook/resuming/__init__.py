"""The choice of the checkpoint that a run resumes from."""
