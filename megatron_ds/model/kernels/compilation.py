"""Compiles layers and loss of a model with torch.compile, and undoes it."""

from __future__ import annotations

from megatron_ds.model.attention.packed import Keys
from megatron_ds.model.gpt import EAGER_TEXT, GPTModel
from megatron_ds.model.kernels.elementwise import Elementwise
from megatron_ds.parallel.fused_linear_cross_entropy import EAGER, LossKernels


def compile_layers(model: GPTModel, *, lengths_vary: bool = False) -> None:
    """Compile each transformer layer and the loss with torch.compile (on their first call).

    Args:
        model: The model.
        lengths_vary: Compile the second sequence length for all lengths, instead of once for
            each length.
    """
    exceptions = dict[str, None]()
    has_documents = model.attention.has_documents
    weight = next(model.parameters())
    keys = Keys(model.config.seq_length, weight.dtype, weight.device, has_documents)
    for block in model.blocks():
        is_traceable = model.attention.backend(block.rule, keys).is_traceable
        # The core of ranks that share sequences exchanges queries, keys and values.
        is_traceable = is_traceable and model.sequence_group.size == 1
        # The number of documents varies, and with it a dimension in the graph.
        dynamic = None if lengths_vary or (is_traceable and has_documents) else False
        left_out = block.compile_parts(is_core_traceable=is_traceable, dynamic=dynamic)
        exceptions |= dict.fromkeys(left_out)
    _set_loss_kernels(model, LossKernels.compiled())
    parts = f" except {' and '.join(exceptions)}" if exceptions else ""
    model.compiled = f"{len(model.blocks())} layers{parts}, loss by torch.compile"
    model.has_compiled_layers = True


def use_elementwise(model: GPTModel, functions: Elementwise, reason: str = "") -> None:
    """Let each layer compute its elementwise parts by compiled functions.

    Args:
        model: The model.
        functions: The functions.
        reason: Why the layers are not compiled.
    """
    for block in model.blocks():
        block.use_elementwise(functions)
    _set_loss_kernels(model, functions.loss)
    model.compiled = "rotary positions, activation, dropout, softmax by torch.compile"
    model.compiled += f"; layers eager ({reason})" if reason else ""


def use_eager(model: GPTModel) -> None:
    """Undo `compile_layers`."""
    for block in model.blocks():
        block.use_eager()
    _set_loss_kernels(model, EAGER)
    model.compiled = EAGER_TEXT
    model.has_compiled_layers = False


def _set_loss_kernels(model: GPTModel, kernels: LossKernels) -> None:
    if model.has_head:
        model.head.kernels = kernels
