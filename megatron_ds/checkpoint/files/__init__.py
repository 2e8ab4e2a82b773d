"""Files of a checkpoint: which rank writes what, reading, and full weights."""
