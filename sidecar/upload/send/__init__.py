"""Transfer of the files of one checkpoint to the store, and the journal of confirmed files and parts."""
