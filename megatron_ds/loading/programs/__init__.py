"""Programs that read checkpoints from any location and write others."""
