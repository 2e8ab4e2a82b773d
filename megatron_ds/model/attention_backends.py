"""The order in which torch's kernels of scaled_dot_product_attention are considered.

A kernel that cannot compute a call is passed over for the next one. On a CPU torch chooses.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ds.config import ModelConfig
from megatron_ds.config.devices import is_host

BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "overrideable": SDPBackend.OVERRIDEABLE,
}
"""Kernels by name, the fastest ones first. The last one is that of a device outside of torch."""
Order = tuple[SDPBackend, ...]
FIXED_SIZES: Order = tuple(BACKENDS.values())
VARYING_SIZES: Order = FIXED_SIZES[1:]
"""Without cuDNN's kernel, which builds a plan of tens of milliseconds for each new number of
queries and keys."""


def order_of(choice: str, *, sizes_vary: bool) -> Order:
    """The kernels to consider for a value of --attention-backend."""
    if choice != "auto":
        return (BACKENDS[choice],)
    return VARYING_SIZES if sizes_vary else FIXED_SIZES


def name_of(backend: SDPBackend) -> str:
    """A kernel's name in `BACKENDS`."""
    return next(name for name, value in BACKENDS.items() if value == backend)


def backends_in_order(order: Order, device: torch.device) -> AbstractContextManager[object]:
    """Within it, torch considers these kernels only, in this order; all of them if it is empty."""
    if not order or is_host(device.type):
        return nullcontext()
    return sdpa_kernel(list(order), set_priority=True)


def selected_backend(
    config: ModelConfig,
    batch: int,
    shards: int,
    dtype: torch.dtype,
    device: torch.device,
    order: Order,
) -> str | None:
    """Name of the kernel that scaled_dot_product_attention selects in training.

    Args:
        config: Architecture.
        batch: Samples of a call.
        shards: Ranks that share the heads: tensor- and sequence-parallel ones.
        dtype: Type of the activations.
        device: Device of the activations.
        order: The kernels to consider.

    Returns:
        The name; None if none of the kernels can compute the call.
    """
    queries = config.seq_length

    def empty(*shape: int) -> torch.Tensor:
        """A tensor of this shape that has only a row of memory."""
        row = torch.empty(shape[-1], dtype=dtype, device=device, requires_grad=True)
        return row.expand(shape)

    def heads(count: int) -> torch.Tensor:
        return empty(batch, max(1, count // shards), queries, config.head_dim)

    q, k = heads(config.num_attention_heads), heads(config.kv_heads)
    alibi = config.position_embedding_type == "alibi"
    bias = empty(1, q.shape[1], queries, queries).detach() if alibi else None
    has_groups = q.shape[1] != k.shape[1]
    if alibi and not is_host(device.type):  # the keys and values are repeated for their queries
        k, has_groups = q, False
    try:
        with backends_in_order(order, device):
            choice = torch._fused_sdp_choice(
                q,
                k,
                k,
                attn_mask=bias,
                dropout_p=config.attention_dropout,
                is_causal=not alibi,
                enable_gqa=has_groups,
            )
    except RuntimeError:
        return None
    except (AttributeError, TypeError):  # not one of torch's public functions
        return "torch's choice"
    backend = SDPBackend(choice)
    is_refused = bool(order) and not is_host(device.type) and backend not in order
    return None if is_refused else name_of(backend)
