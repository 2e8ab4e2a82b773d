"""The trial of compiled layers: whether they compute on this device what the eager ones do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from megatron_ds.model.gpt import GPTModel, keys_of
from megatron_ds.model.kernels.elementwise import largest_error, loss_results
from megatron_ds.parallel.fused_linear_cross_entropy import EAGER, LossKernels

TOLERANCE = 3e-2
"""Largest accepted error, relative to the norm; a compiled layer rounds bf16 at other places."""


def try_layers(model: GPTModel, micro_batch: int, *, lengths_vary: bool) -> str | None:
    """Compile the layers and the loss, and compare them with the eager ones.

    One layer is run, forward and backward, on a micro-batch of the run. Other layers have its
    graph, so the first step needs no further compilation.

    Args:
        model: A model without tensor parallelism, on its device.
        micro_batch: Samples of a micro-batch.
        lengths_vary: As for `GPTModel.compile_layers`.

    Returns:
        Why the trial failed, after which the caller undoes the compilation; None if it did not.
    """

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        eager = list(_results(model, micro_batch, EAGER))
        model.compile_layers(lengths_vary=lengths_vary)
        yield from zip(_results(model, micro_batch, LossKernels.compiled()), eager, strict=True)

    error = largest_error(pairs)
    if not isinstance(error, str) and error <= TOLERANCE:
        return None
    return error if isinstance(error, str) else f"their relative error is {error:.2g}"


@contextmanager
def _trial_weights(block: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """Give a layer random weights inside the context.

    Its own are arbitrary, perhaps nan, until a checkpoint has been loaded.
    """
    parameters = list(block.parameters())
    kept = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.fill_(1.0)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, values in zip(parameters, kept, strict=True):
                parameter.copy_(values)


def _results(model: GPTModel, micro_batch: int, kernels: LossKernels) -> Iterator[Tensor]:
    """Output and gradient of a layer, and the results of the loss's kernels."""
    config, weight = model.config, next(model.parameters())
    length, device = config.seq_length, weight.device
    generator = torch.Generator(device).manual_seed(0)
    shape = length, micro_batch, config.hidden_size
    x = torch.randn(shape, generator=generator, device=device, dtype=weight.dtype).requires_grad_()
    packed, packing = None, model.attention.packing
    if packing is not None:
        tokens = torch.full((micro_batch, length), packing.eod - 1, device=device)
        packed = packing.find_documents(tokens, micro_batch)
    keys = keys_of(x, length, packed)
    stream = x.float() if config.fp32_residual_connection else x
    for block in model.blocks()[:1]:
        with _trial_weights(block, generator):
            y = block(stream, model.positions.contexts([block.rule], keys)[block.rule])
            (gradient,) = torch.autograd.grad(y, x, stream.detach())
        pair = y.detach(), gradient
        if max(config.hidden_dropout, config.attention_dropout) > 0:
            pair = pair[0].isfinite().float(), pair[1].isfinite().float()  # the masks differ
        yield from pair
    yield from loss_results(kernels, config, length * micro_batch, 1, like=x.detach())
