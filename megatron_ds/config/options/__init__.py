"""Options of a run besides the model and its monitoring, one module per group."""
