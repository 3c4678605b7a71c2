"""Files of one checkpoint on their way to the store, and the journal of what arrived."""
