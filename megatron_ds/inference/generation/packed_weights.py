"""Weights in the layout of a CPU's matrix kernels, which then need not arrange them in every pass.

With oneDNN's layout a pass of few tokens takes about half the time or less. torch's compiler
uses the same operators for constant weights; they have no public names, so a product that they
cannot compute keeps its weight.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config.devices import is_host
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.output_layer import OutputLayer
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear

DTYPES = (torch.float32, torch.bfloat16)
TYPICAL_TOKENS = 24
"""Number of tokens for which the packed layout is optimized; matmuls work for any number of
tokens."""
SMALL = 2**18
"""Elements of an fp32 weight below which the call of oneDNN takes longer than the matmul of one
token."""


class PackedProduct:
    """x W^T + b of a weight [out, in] in oneDNN's layout.

    Attributes:
        plain: The weight itself, if it is used for single tokens.

    Raises:
        RuntimeError: If this machine or torch cannot compute it.
    """

    def __init__(self, weight: Tensor) -> None:
        is_small = weight.dtype == torch.float32 and weight.numel() < SMALL
        self.plain = weight if is_small else None
        operators = torch.ops.mkldnn
        try:
            self._weight = operators._reorder_linear_weight(weight.detach(), TYPICAL_TOKENS)
            self._product = operators._linear_pointwise
        except AttributeError as error:
            raise RuntimeError(str(error)) from error
        self(weight.new_zeros(1, weight.shape[1]), None)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """[..., in] to [..., out]."""
        is_single = x.numel() == x.shape[-1]
        if self.plain is not None and is_single:
            return F.linear(x, self.plain, bias)
        if is_single and x.dtype == torch.bfloat16:
            # Another kernel, whose sums are rounded differently, computes a single row.
            return self(x.view(1, -1).expand(2, -1), bias)[:1].view(*x.shape[:-1], -1)
        y: Tensor = self._product(x, self._weight, bias, "none", [], "")
        return y


@torch.no_grad()
def pack_weights(model: GPTModel) -> None:
    """Packs the matrices of a model on a CPU that will not be trained.

    Their parameters are emptied, except for those that are still used.
    """
    embedding = model.embedding.word.weight
    for module in model.modules():
        if not isinstance(module, ColumnParallelLinear | RowParallelLinear | OutputLayer):
            continue
        weight = embedding if module.weight is None else module.weight
        if not is_host(weight.device.type) or weight.dtype not in DTYPES:
            continue
        try:
            product = PackedProduct(weight)
        except RuntimeError:
            continue
        module.product = product
        if product.plain is None and weight is not embedding:
            weight.data = weight.new_empty(0)
