"""Scaling laws: ladders of small runs, and the loss that their laws predict for a large one."""
