"""Attention: rules per layer, masks, the table of backends and their trial at start-up."""
