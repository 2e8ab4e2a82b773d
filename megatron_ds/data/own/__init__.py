"""Datasets that a program brings, and mock data."""
