"""Matmuls of half-precision tensors on CPUs without instructions for them.

torch multiplies such matrices element by element there, in up to thirty times the time of fp32.
Owns the replacement of these kernels: they multiply the same values in fp32 and round the result
once, as kernels with instructions for the type do. It covers all matmuls of the process, also in
the backward pass, in torch.compile's graphs, and in DeepSpeed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megatron_ds.config.devices import HOST, is_host
from megatron_ds.config.problems import Problem

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operators to which torch reduces its other matmuls and linear layers."""
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
"""torch's fused attention on CPUs, whose backward pass has such matmuls."""
TOLERANCE = {torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Relative error of a result that is rounded once."""


def replace_slow_products(dtype: torch.dtype, device: torch.device) -> Problem | None:
    """Replace torch's matmuls of a data type for the rest of the process, if they are slow on this
    CPU.

    Args:
        dtype: Type of the model's parameters.
        device: Device of the model.

    Returns:
        The note for the user that matmuls are computed in fp32, or that they are slow because the
        replacement does not work here; None if torch's matmuls are fast.
    """
    if not is_host(device.type) or has_instructions(dtype):
        return None
    try:
        _replace(dtype)
    except Exception as error:  # not all of torch's interfaces that it needs are stable
        return Problem("slow-half-products", dtype=_name(dtype), reason=error)
    return Problem("half-products-in-fp32", dtype=_name(dtype))


def has_instructions(dtype: torch.dtype) -> bool:
    """Whether torch has fast matmuls of a data type on this CPU."""
    if dtype not in TOLERANCE:
        return True
    question = f"_is_mkldnn_{'bf16' if dtype == torch.bfloat16 else 'fp16'}_supported"
    try:
        return bool(getattr(torch.ops.mkldnn, question)())
    except (AttributeError, RuntimeError):  # a build without oneDNN
        return False


@cache
def _replace(dtype: torch.dtype) -> torch.library.Library:
    """Replace the kernels; the result keeps them, and is the same for each call."""
    library = torch.library.Library("aten", "IMPL")
    names = [f"{name}{overload}" for name in PRODUCTS for overload in (".default", ".out")]
    names += [f"{ATTENTION}.default", f"{ATTENTION}_backward.default"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of replaced kernels
        for name in names:
            function = _in_fp32(name, dtype)
            library.impl(name.removesuffix(".default"), function, HOST.upper(), allow_override=True)
    try:
        _try(dtype)
    except Exception:
        library._destroy()
        raise
    return library


def _in_fp32(name: str, dtype: torch.dtype) -> Callable[..., Any]:
    """An operator that computes in fp32 what it is given in a type."""
    packet, _, overload = name.partition(".")
    key = getattr(torch.DispatchKey, HOST.upper())
    keys = torch._C.DispatchKeySet(key)
    kernel = torch.library.get_kernel(f"aten::{name.removesuffix('.default')}", HOST.upper())
    compute = torch.library.get_kernel(f"aten::{packet}", HOST.upper())

    def widen(value: Any) -> Any:
        is_half = isinstance(value, Tensor) and value.dtype == dtype
        return value.float() if is_half else value

    def product(*args: Any, **options: Any) -> Any:
        if args[0].dtype != dtype:
            return kernel.call_boxed(keys, *args, **options)
        out = options.pop("out", None)
        options = {key: widen(value) for key, value in options.items()}
        result = compute.call_boxed(keys, *map(widen, args), **options)
        if overload == "out":
            assert out is not None
            if out.shape != result.shape:
                out.resize_(result.shape)
            return out.copy_(result)
        if packet == ATTENTION:  # the logarithms of the sums stay in fp32
            return result[0].to(dtype), result[1]
        is_tensor = isinstance(result, Tensor)
        return result.to(dtype) if is_tensor else tuple(tensor.to(dtype) for tensor in result)

    return product


def _try(dtype: torch.dtype) -> None:
    """Compare a product with its value in fp64.

    Raises:
        RuntimeError: If it is not that value, rounded once.
    """
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(32, 32, generator=generator).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    for actual in (a @ b, torch.mm(a, b, out=torch.empty_like(a))):
        error = float((actual.double() - exact).abs().max() / exact.abs().max())
        if not error <= TOLERANCE[dtype]:
            raise RuntimeError(f"the error is {error:.2g}")


def _name(dtype: torch.dtype) -> str:
    return "bf16" if dtype == torch.bfloat16 else "fp16"
