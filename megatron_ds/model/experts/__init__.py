"""Mixture of experts: the router, and the grouped matmuls of the experts."""
