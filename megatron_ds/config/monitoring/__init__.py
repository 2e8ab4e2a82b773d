"""Options of what a run evaluates, logs and measures, and of when it stops."""
