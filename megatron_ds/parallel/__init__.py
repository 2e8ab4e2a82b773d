"""Tensor parallelism: rank arithmetic, collectives, sharded layers and their random streams."""
