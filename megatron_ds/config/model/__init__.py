"""Options of the model."""
