"""Text generation from a checkpoint."""
