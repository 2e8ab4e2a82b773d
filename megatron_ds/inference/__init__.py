"""From a checkpoint and prompts to generated tokens."""
