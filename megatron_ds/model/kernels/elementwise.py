"""Elementwise parts: rotary positions, activation, dropout with residual addition, softmax.

They are limited by memory bandwidth, and torch.compile makes one kernel of each. Owns their
mathematics, which is the same compiled or not, and the trial of the compiled ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.config import ModelConfig
from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import Problem
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.position_embedding import Rotation, rope_table, rotate
from megatron_ds.parallel.fused_linear_cross_entropy import EAGER as EAGER_LOSS
from megatron_ds.parallel.fused_linear_cross_entropy import LossKernels, chunk_rows
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.sequence import dropout

TOLERANCE = 1e-2
"""Largest accepted error of a compiled function, relative to the norm; bf16 may be rounded once
instead of after each operation."""
TANH_SLOPE = 2 * math.sqrt(2 / math.pi)
TANH_CUBIC = 0.044715 * TANH_SLOPE
"""Coefficients of x and x^3 in twice the argument of GELU's tanh."""


def _quick_gelu(gate: Tensor) -> Tensor:
    """An approximation of GELU (Hendrycks and Gimpel 2016)."""
    return gate * torch.sigmoid(1.702 * gate)


def _gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016), exactly ("none") or by its approximation with "tanh"."""
    if approximate == "tanh" and is_host(x.device.type) and torch.compiler.is_compiling():
        # x (1 + tanh u) / 2 = x sigmoid(2 u). On CPUs, torch's compiler has no fast tanh: it
        # takes twice as long as the exponential function of the sigmoid.
        x32 = x.float()
        doubled = x32 * (TANH_SLOPE + TANH_CUBIC * x32 * x32)
        return (x32 * torch.sigmoid(doubled)).to(x.dtype)
    return F.gelu(x, approximate=approximate)


def _identity(gate: Tensor) -> Tensor:
    return gate


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": F.silu,
    "quick-geglu": _quick_gelu,
    "reglu": F.relu,
    "liglu": _identity,
}
"""Functions of the gate, by activation (Shazeer 2020)."""


def activate(
    x: Tensor, activation: str, gelu_kind: str, limit: float | None = None, offset: float = 0.0
) -> Tensor:
    """The MLP's activation: [..., F] to [..., F], or gated [..., 2F] = [gate; up] to [..., F]."""
    if activation in GATES or activation == "geglu":
        gate, up = x.chunk(2, dim=-1)
        if limit is not None:
            gate = gate.clamp(max=limit)
            up = up.clamp(-limit, limit)
        if offset:
            up = up + offset
        if activation == "geglu":
            return _gelu(gate, gelu_kind) * up
        return GATES[activation](gate) * up
    match activation:
        case "gelu":
            return _gelu(x, gelu_kind)
        case "openai-gelu":
            return _gelu(x, "tanh")
        case "squared-relu":  # So et al. 2021
            return F.relu(x).square()
    raise AssertionError(activation)


def activate_eagerly(
    x: Tensor, activation: str, gelu_kind: str, limit: float | None = None, offset: float = 0.0
) -> Tensor:
    """`activate` in an eager layer, without a copy of the gradients of gate and up into one."""
    is_plain = activation == "swiglu" and limit is None and not offset
    if is_plain and not torch.compiler.is_compiling():  # a compiler makes no copy
        y: Tensor = _SwiGLU.apply(x)
        return y
    return activate(x, activation, gelu_kind, limit, offset)


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up, for [..., 2F] = [gate; up]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1)
        opened = F.silu(gate)
        ctx.save_for_backward(x, opened)
        return opened * up

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, opened = ctx.saved_tensors
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(gradient, opened, out=dup)
        torch.ops.aten.silu_backward.grad_input(gradient * up, gate, grad_input=dgate)
        return dx


def add_dropout(residual: Tensor, x: Tensor, probability: float, group: Group) -> Tensor:
    """residual + dropout(x)."""
    return residual + dropout(x, probability, group)


@dataclass(frozen=True)
class Elementwise:
    """The functions that a layer and the output layer call."""

    rotate: Callable[[Tensor, Rotation], Tensor] = rotate
    activate: Callable[..., Tensor] = activate_eagerly
    add_dropout: Callable[[Tensor, Tensor, float, Group], Tensor] = add_dropout
    loss: LossKernels = EAGER_LOSS


EAGER = Elementwise()


def compile_elementwise(
    config: ModelConfig, micro_batch: int, group: Group, dtype: torch.dtype, device: torch.device
) -> tuple[Elementwise, Problem | None]:
    """Compile the functions if they then compute what they should on this device.

    They are tried, forward and backward, on tensors of the run's shapes, so the first step needs no
    further compilation. Compiled dropout draws other numbers than eager dropout.

    Args:
        config: Architecture.
        micro_batch: Samples of a micro-batch.
        group: Tensor-parallel group.
        dtype: Type of the activations.
        device: Device of the activations.

    Returns:
        The compiled functions, or the eager ones and the reason why.
    """
    compiled = EAGER

    def pairs() -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal compiled
        compiled = Elementwise(
            torch.compile(rotate),
            torch.compile(activate),
            torch.compile(add_dropout),
            LossKernels.compiled(),
        )
        shape = config, micro_batch, group, dtype, device
        yield from zip(_results(compiled, *shape), _results(EAGER, *shape), strict=True)

    problem = compilation_problem(pairs)
    return (compiled, None) if problem is None else (EAGER, problem)


def compilation_problem(pairs: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> Problem | None:
    """Why a compiled function is not used; None if it computes what it should.

    Args:
        pairs: Computes what is compared, and what it should be.
    """
    error = largest_error(pairs)
    if isinstance(error, str):
        return Problem("compilation-failed", reason=error)
    if not error <= TOLERANCE:  # also if the error is nan
        return Problem("compilation-inaccurate", error=error)
    return None


def largest_error(pairs: Callable[[], Iterable[tuple[Tensor, Tensor]]]) -> float | str:
    """The largest error of a trial relative to the norm, nan if any is; or why the trial failed.

    Args:
        pairs: Computes what is compared, and what it should be.
    """
    try:
        errors = [(actual - expected).norm() / expected.norm() for actual, expected in pairs()]
        return float(torch.stack(errors).max())  # unlike Python's maximum, nan if any is
    except Exception as refusal:  # compilers and devices raise any type
        first_line = str(refusal).strip().partition("\n")[0]
        return first_line or type(refusal).__name__


def _results(
    functions: Elementwise,
    config: ModelConfig,
    micro_batch: int,
    group: Group,
    dtype: torch.dtype,
    device: torch.device,
) -> Iterator[Tensor]:
    """Outputs and gradients of the functions that the architecture uses."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        shape = (config.seq_length, micro_batch, *size)
        return torch.randn(shape, generator=generator, device=device, dtype=dtype).requires_grad_()

    def run(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        y = function(x)
        (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y))
        return y.detach(), gradient

    if rope := next((rule.rope for rule in attention_rules(config) if rule.rope), None):
        table = rope_table(config.seq_length, rope, device)
        heads = (config.num_attention_heads + config.kv_heads) // group.size
        # A part of the fused projection, as in a layer.
        x = draw(heads + config.kv_heads // group.size, config.head_dim)
        yield from run(lambda x: functions.rotate(x[:, :, :heads], table), x)
    x = draw(config.mlp_hidden_size // group.size * (2 if config.is_gated else 1))
    num_tokens = config.seq_length * micro_batch
    yield from loss_results(functions.loss, config, num_tokens, group.size, like=x.detach())
    yield from run(lambda x: functions.activate(x, *config.activation_arguments), x)
    if config.hidden_dropout > 0:
        x = draw(config.hidden_size)
        probability = config.hidden_dropout
        if group.sequence_parallel:
            x = x.detach().chunk(group.size)[group.rank].clone().requires_grad_()
        zeros = torch.zeros_like(x, requires_grad=True)  # as the residual stream does in a layer
        y, gradient = run(lambda x: functions.add_dropout(zeros, x, probability, group), x)
        # The masks differ, so the errors of what is kept are compared.
        scale = torch.where(y != 0, 1 / (1 - probability), 0.0)
        yield from (1 + y - x.detach() * scale, 1 + gradient - scale)


@torch.no_grad()  # as in the loss, which computes its gradient itself
def loss_results(
    kernels: LossKernels, config: ModelConfig, num_tokens: int, tp_size: int, like: Tensor
) -> list[Tensor]:
    """Outputs of the loss's kernels on tensors with the type and the device of `like`."""
    width = config.padded_vocab(tp_size) // tp_size
    on_host = is_host(like.device.type)
    rows = chunk_rows(num_tokens, width, like.element_size(), on_host=on_host)
    generator = torch.Generator(like.device).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(size, generator=generator, device=like.device, dtype=dtype)

    # The last chunk may have fewer rows, for which softmax is compiled again.
    sizes = {rows, num_tokens % rows or rows}
    logits = [draw(size, width, dtype=like.dtype) for size in sorted(sizes, reverse=True)]
    log_sums = [kernels.softmax_(one) for one in logits]
    # The gradients of several chunks, and of fp16, are summed in fp32.
    is_single = rows == num_tokens and like.dtype != torch.float16
    gradients = (
        draw(num_tokens, config.hidden_size, dtype=like.dtype),
        draw(2 * num_tokens, config.hidden_size, dtype=like.dtype if is_single else torch.float32),
    )
    return [*log_sums, *logits, *(kernels.multiply(one, log_sums[0][0]) for one in gradients)]
