"""Options of a run besides the model, one module per group."""
