"""Tensor parallelism: rank arithmetic, collectives, parallel layers and the random streams they
need.
"""
