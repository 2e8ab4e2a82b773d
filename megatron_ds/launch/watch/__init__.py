"""Watches of a run: hanging ranks, lost hosts and lost launchers."""
