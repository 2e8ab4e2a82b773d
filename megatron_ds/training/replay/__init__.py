"""Replays of recorded steps, by which a run is checked."""
