"""Finds the documents that a step of a run has read, and the steps that have read a document."""
