"""Generation of tokens: cache, scheduling of sequences, sampling and stop rules."""
