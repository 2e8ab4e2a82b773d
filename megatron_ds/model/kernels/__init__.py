"""Fused kernels and compiled functions that layers use where the device has them."""
