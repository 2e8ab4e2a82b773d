"""The trial of compiled layers: whether they compute on this device what the eager ones do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from megatron_ds.model.block import Block
from megatron_ds.model.gpt import GPTModel, keys_of
from megatron_ds.model.kernels.compilation import compile_layers
from megatron_ds.model.kernels.elementwise import largest_error, loss_results
from megatron_ds.model.moe import MoE
from megatron_ds.parallel.fused_linear_cross_entropy import EAGER, LossKernels

TOLERANCE = 3e-2
"""Largest accepted error, relative to the norm; a compiled layer rounds bf16 at other places."""


Gathered = Callable[[nn.Module], AbstractContextManager[object]]
"""Context in which a rank has the complete parameters of a module."""


def whole(module: nn.Module) -> AbstractContextManager[object]:
    """The context of a module whose parameters are not partitioned."""
    return nullcontext()


def try_layers(
    model: GPTModel, micro_batch: int, *, lengths_vary: bool, gathered: Gathered = whole
) -> str | None:
    """Compile the layers and the loss, and compare them with the eager ones. Collective.

    A dense layer and one with experts are run, forward and backward, on a micro-batch of the run;
    experts are left out, because what they compute is in no graph. Other layers have the graphs of
    these, so the first step needs no further compilation.

    Args:
        model: A model on its device.
        micro_batch: Samples of a micro-batch.
        lengths_vary: See `compile_layers`.
        gathered: Gives this rank the parameters of a layer.

    Returns:
        Why the trial failed, after which the caller undoes the compilation; None if it did not.
    """

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        eager = list(_results(model, micro_batch, EAGER, gathered))
        compile_layers(model, lengths_vary=lengths_vary)
        compiled = _results(model, micro_batch, LossKernels.compiled(), gathered)
        yield from zip(compiled, eager, strict=True)

    error = largest_error(pairs)
    if not isinstance(error, str) and error <= TOLERANCE:
        return None
    return error if isinstance(error, str) else f"their relative error is {error:.2g}"


@contextmanager
def _in_trial(block: Block, generator: torch.Generator, gathered: Gathered) -> Iterator[None]:
    """Give a layer random weights inside the context, and no experts.

    Its own weights are arbitrary, perhaps nan, until a checkpoint has been loaded. Rounding would
    send tokens to other experts.
    """
    mlp = block.mlp
    with gathered(block), torch.no_grad():
        parameters = list(block.parameters())
        if isinstance(mlp, MoE):
            block.mlp = nn.Identity()
        # Not by the parameters themselves: partitioned ones must not seem changed.
        copies = [parameter.data.clone() for parameter in parameters]
        for parameter in parameters:
            if parameter.dim() > 1:
                parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            else:
                parameter.data.fill_(1.0)
        try:
            with torch.enable_grad():
                yield
        finally:
            block.mlp = mlp
            for parameter, values in zip(parameters, copies, strict=True):
                parameter.data.copy_(values)


def _results(
    model: GPTModel, micro_batch: int, kernels: LossKernels, gathered: Gathered
) -> Iterator[Tensor]:
    """Output and gradient of a layer of each kind, and the results of the loss's kernels."""
    config = model.config
    weight = next(model.parameters())
    length = config.seq_length
    local = length // model.sequence_group.size
    device = weight.device
    generator = torch.Generator(device).manual_seed(0)
    documents = None
    packing = model.attention.packing
    if packing is not None:
        last = torch.zeros((micro_batch, length), dtype=torch.bool, device=device)
        documents = packing.documents(last, micro_batch)
    tp_size = 1
    for block in {isinstance(block.mlp, MoE): block for block in reversed(model.blocks())}.values():
        tp_size = block.group.size
        parts = tp_size if block.group.sequence_parallel else 1
        shape = local // parts, micro_batch, config.hidden_size
        x = torch.randn(shape, generator=generator, device=device, dtype=weight.dtype)
        x.requires_grad_()
        stream = x.float() if config.fp32_residual_connection else x
        keys = keys_of(x, length, documents)
        context = model.positions.contexts({block.layer: block.rule}, keys)[block.layer]
        with _in_trial(block, generator, gathered):
            y = block.forward(stream, context)  # without hooks
            (gradient,) = torch.autograd.grad(y, x, stream.detach())
        pair = y.detach(), gradient
        if max(config.hidden_dropout, config.attention_dropout) > 0:
            pair = pair[0].isfinite().float(), pair[1].isfinite().float()  # the masks differ
        yield from pair
    yield from loss_results(kernels, config, local * micro_batch, tp_size, like=weight.detach())
