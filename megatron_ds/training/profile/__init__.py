"""Profiles of steps, and the comparison of the ranks' speeds."""
