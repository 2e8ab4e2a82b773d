"""What the installed torch is known to compile wrongly, told without importing it."""

from __future__ import annotations

from importlib.metadata import version

CORRECT = (2, 13)
"""Compiled by torch 2.11, the linear layer of DeepSpeed's `memory_efficient_linear` gives wrong
gradients for inputs of three dimensions, such as [S, B, H]."""


def compiles_efficient_linear() -> bool:
    """Whether DeepSpeed's `memory_efficient_linear` can be compiled."""
    major, minor = version("torch").split(".")[:2]
    return (int(major), int(minor)) >= CORRECT
