"""How two runs are compared: every figure, and every tensor by its largest element."""

from __future__ import annotations

import torch

from tests.dist.reference import Run, Tensors

RELATIVE = 1e-5


def differences(run: Run, reference: Run, relative: float = RELATIVE) -> list[str]:
    """Every way in which `run` differs from `reference` by more than `relative`, a line each."""
    found = []
    for kind in ("losses", "norms", "gradients", "weights"):
        ours, theirs = getattr(run, kind), getattr(reference, kind)
        if len(ours) != len(theirs):
            found.append(f"{len(ours)} {kind} instead of {len(theirs)}")
    for kind in ("losses", "norms"):
        pairs = zip(getattr(run, kind), getattr(reference, kind), strict=False)
        for step, (value, wanted) in enumerate(pairs):
            if value is None or not abs(value - wanted) <= relative * abs(wanted):
                found.append(f"{kind}[{step}] {value} instead of {wanted}")
    for kind in ("gradients", "weights"):
        pairs = zip(getattr(run, kind), getattr(reference, kind), strict=False)
        for step, (tensors, wanted) in enumerate(pairs):
            if tensors.keys() != wanted.keys():
                found.append(f"{kind}[{step}]: {sorted(tensors.keys() ^ wanted.keys())}")
                continue
            error, name = worst(tensors, wanted)
            if not error <= relative:
                found.append(f"{kind}[{step}] of {name}: off by {error:.2e} of the largest")
    return found


def worst(tensors: Tensors, reference: Tensors) -> tuple[float, str]:
    """The largest difference relative to the largest element of its tensor, and the tensor's name.

    A tensor that is all zeros must be so exactly.
    """
    errors = []
    for name, wanted in reference.items():
        off, scale = (tensors[name] - wanted).abs().max(), wanted.abs().max()
        if torch.isnan(off):
            return float("inf"), name
        errors.append((0.0 if off == 0 else (off / scale).item(), name))
    return max(errors)
