"""Pairs of token files (.bin and .idx): reading, writing, merging and describing them."""
