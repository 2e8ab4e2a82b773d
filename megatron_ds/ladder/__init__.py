"""Ladders of small runs: derived from a recipe, trained, fitted, and judged by the large run."""
