"""Reads shell scripts."""
