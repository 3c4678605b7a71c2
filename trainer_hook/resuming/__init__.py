"""Choice of the checkpoint that a run resumes from, by all ranks together."""
