"""The start of a run: checks, settings that all ranks share, and what is reported."""
