"""Blends of token files: their specification, their schedule and their continuation on resume."""
