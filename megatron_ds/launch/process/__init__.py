"""One process from its first line to its exit status."""
