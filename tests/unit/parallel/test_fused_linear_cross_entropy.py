"""The fused output layer and loss, compared with separate ones in fp64."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ds.parallel import chunks, fused_linear_cross_entropy
from megatron_ds.parallel.fused_linear_cross_entropy import (
    LossKernels,
    LossTerms,
    chunk_rows,
    fusible_softmax_,
    linear_cross_entropy,
)
from megatron_ds.parallel.mesh import Group, Mesh
from tests.observed import Observed, tensors_of
from tests.problems import raises_problem

TOKENS = 24
VOCAB = 50
PADDED = 64
HIDDEN = 16
GROUP = Mesh.single().tp
FUSIBLE = LossKernels(softmax_=fusible_softmax_)
"""What torch.compile compiles, without compiling it."""


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(PADDED, HIDDEN, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    return x, weight, labels, torch.randint(0, 3, (TOKENS,), generator=generator).float()


def reference(
    x: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients in fp64."""
    x, weight = (tensor.detach().double().requires_grad_() for tensor in (x, weight))
    losses = F.cross_entropy(x @ weight[:VOCAB].t(), labels, reduction="none")
    loss = (losses * weights).sum()
    loss.backward()
    return loss.detach(), x.grad, weight.grad


def relative_error(actual: torch.Tensor | None, expected: torch.Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("kernels", [LossKernels(), FUSIBLE], ids=["eager", "fusible"])
@pytest.mark.parametrize("chunk_tokens", [TOKENS, 7, 1])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_loss_and_gradients_equal_those_of_separate_layers(
    dtype: torch.dtype,
    limit: float,
    chunk_tokens: int,
    kernels: LossKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weight, labels, weights = inputs(dtype)
    chunk_bytes = chunk_tokens * PADDED * torch.finfo(dtype).bits // 8
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk_bytes)
    monkeypatch.setattr(fused_linear_cross_entropy, "CACHED_LOGITS", 3 * VOCAB)
    expected, grad_x, grad_weight = reference(x, weight, labels, weights)
    loss, _ = linear_cross_entropy(
        x, weight, labels, weights, vocab_size=VOCAB, group=GROUP, kernels=kernels
    )
    assert loss.dtype == torch.float32
    # The logits are of the model's type, so a single one is no better than that type.
    assert relative_error(loss, expected) < limit
    loss.backward()
    assert x.grad.dtype == dtype
    assert relative_error(x.grad, grad_x) < limit
    assert relative_error(weight.grad, grad_weight) < limit
    assert weight.grad[VOCAB:].eq(0.0).all()


@pytest.mark.parametrize("kernels", [LossKernels(), FUSIBLE], ids=["eager", "fusible"])
@pytest.mark.parametrize("terms", [LossTerms(0.3), LossTerms(0.0, 2.0), LossTerms(0.3, 2.0)])
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_further_terms_have_the_gradients_of_separate_layers(
    dtype: torch.dtype,
    limit: float,
    terms: LossTerms,
    kernels: LossKernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Claim (precision): the z-loss and the bound of logits have the values and gradients of
    fp64"""
    x, weight, labels, weights = inputs(dtype)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 7 * PADDED * dtype.itemsize)
    one_x, one_weight = (one.detach().double().requires_grad_() for one in (x, weight))
    logits = one_x @ one_weight[:VOCAB].t()
    if terms.softcap is not None:
        logits = terms.softcap * torch.tanh(logits / terms.softcap)
    expected = (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
    expected_z = (logits.logsumexp(dim=-1) ** 2 * weights).sum()
    (expected + terms.z_loss_coeff * expected_z).backward()
    loss, z_loss = linear_cross_entropy(
        x, weight, labels, weights, vocab_size=VOCAB, group=GROUP, kernels=kernels, terms=terms
    )
    loss.backward()
    assert relative_error(loss.detach(), expected.detach()) < limit
    assert (z_loss is None) == (terms.z_loss_coeff == 0)
    if z_loss is not None:
        assert not z_loss.requires_grad
        assert relative_error(z_loss, expected_z.detach()) < limit
    assert relative_error(x.grad, one_x.grad) < limit
    assert relative_error(weight.grad, one_weight.grad) < limit


def test_evaluation_has_the_same_loss_and_no_graph() -> None:
    x, weight, labels, weights = inputs(torch.float32)
    training, _ = linear_cross_entropy(x, weight, labels, weights, vocab_size=VOCAB, group=GROUP)
    with torch.no_grad():
        loss, _ = linear_cross_entropy(x, weight, labels, weights, vocab_size=VOCAB, group=GROUP)
    assert torch.equal(loss, training.detach())
    assert not loss.requires_grad


def z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels, reduction="none") + logits.logsumexp(dim=-1).square()


def test_a_custom_loss_has_the_gradients_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 7 * PADDED * 4)
    x, weight, labels, weights = inputs(torch.float32)
    one_x, one_weight = (one.detach().double().requires_grad_() for one in (x, weight))
    expected = (z_loss(one_x @ one_weight[:VOCAB].t(), labels) * weights).sum()
    expected.backward()
    loss, _ = linear_cross_entropy(
        x, weight, labels, weights, vocab_size=VOCAB, group=GROUP, function=z_loss
    )
    loss.backward()
    for actual, other in ((loss, expected), (x.grad, one_x.grad), (weight.grad, one_weight.grad)):
        assert relative_error(actual, other) < 1e-6


def test_a_custom_loss_of_another_shape_is_an_error() -> None:
    x, weight, labels, weights = inputs(torch.float32)
    with raises_problem("loss-of-other-shape"):
        linear_cross_entropy(
            x, weight, labels, weights, vocab_size=VOCAB, group=GROUP, function=F.cross_entropy
        )


def test_fp16_gradients_are_scaled_in_fp32() -> None:
    """Division by many tokens and multiplication by the loss scale would underflow in fp16."""
    x, weight, labels, weights = inputs(torch.float16)
    _, grad_x, _ = reference(x, weight, labels, weights)
    loss, _ = linear_cross_entropy(x, weight, labels, weights, vocab_size=VOCAB, group=GROUP)
    (loss / 1e7 * 2.0**16).backward()
    assert relative_error(x.grad, grad_x / 1e7 * 2.0**16) < 2e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_factor_of_the_loss_is_multiplied_in_fp32(dtype: torch.dtype) -> None:
    """Loss scale over tokens: fp16 does not have this factor, bf16 rounds it by 0.2 %."""
    factor = 2.0**20 / 3

    def gradients(factor: float) -> list[torch.Tensor]:
        x, weight, labels, weights = inputs(dtype)
        weights = weights / 2**10
        loss, _ = linear_cross_entropy(x, weight, labels, weights, vocab_size=VOCAB, group=GROUP)
        return [grad.double() for grad in torch.autograd.grad(loss * factor, (x, weight))]

    for scaled, plain in zip(gradients(factor), gradients(1.0), strict=True):
        # Rounding errors of the elements average out in the projection.
        ratio = (scaled * plain).sum() / plain.square().sum() / factor
        assert abs(ratio.item() - 1.0) < 1e-3


@pytest.mark.parametrize("kernels", [LossKernels(), FUSIBLE], ids=["eager", "fusible"])
def test_extreme_logits_stay_finite(kernels: LossKernels) -> None:
    x, weight, labels, weights = inputs(torch.float32)
    huge = (x * 1e3).detach().requires_grad_()
    loss, _ = linear_cross_entropy(
        huge, weight, labels, None, vocab_size=VOCAB, group=GROUP, kernels=kernels
    )
    loss.backward()
    expected, grad_x, _ = reference(huge, weight, labels, torch.ones(TOKENS))
    assert relative_error(loss, expected) < 1e-6
    assert relative_error(huge.grad, grad_x) < 1e-3
    assert weights.sum() > 0


class TensorSizes(Observed):
    """Records the sizes of the tensors that operations return.

    Args:
        watched: Elements of the tensors that are counted while they exist.
    """

    def __init__(self, watched: int) -> None:
        super().__init__(self._record)
        self.elements: dict[torch.dtype, int] = {}
        """Of the largest tensor by type."""
        self.most = 0
        """Watched tensors with a memory of their own that existed at a time."""
        self._watched = watched
        self._alive: dict[int, weakref.ref[torch.Tensor]] = {}

    def _record(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        for one in tensors_of(result):
            self.elements[one.dtype] = max(self.elements.get(one.dtype, 0), one.numel())
        if operator is torch.ops.aten.mm and result.numel() == self._watched:
            self._alive[id(result)] = weakref.ref(result)
            self.most = max(self.most, sum(ref() is not None for ref in self._alive.values()))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_gradients", [True, False])
def test_logits_of_a_chunk_exist_at_a_time_and_few_of_them_in_fp32(
    with_gradients: bool, dtype: torch.dtype, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (parallel): the loss keeps one chunk of logits at a time, and few of them in fp32, also
    if the vocabulary is sharded"""
    tokens = 256
    vocab = 512
    hidden = 8
    chunk = 24
    cached = 2
    done = SimpleNamespace(wait=lambda: None)
    monkeypatch.setattr(dist, "all_gather", lambda parts, x, group: [p.copy_(x) for p in parts])
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: done)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", chunk * vocab * dtype.itemsize)
    monkeypatch.setattr(fused_linear_cross_entropy, "CACHED_LOGITS", cached * vocab)
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=with_gradients)
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=with_gradients)
    labels = torch.randint(0, ranks * vocab, (tokens,))
    group = Group(tuple(range(ranks)), 0, None)

    with TensorSizes(chunk * vocab) as sizes, torch.set_grad_enabled(with_gradients):
        loss, _ = linear_cross_entropy(
            x, weight, labels, None, vocab_size=ranks * vocab, group=group
        )
        if with_gradients:
            loss.backward()

    assert sizes.elements[dtype] == chunk * vocab
    assert sizes.most == 1
    if dtype != torch.float32:  # the weight's gradient is summed, and both are scaled, in fp32
        gradients = max(vocab, tokens) * hidden if with_gradients else 0
        assert sizes.elements[torch.float32] == max(cached * vocab, gradients)


@pytest.mark.parametrize("with_gradients", [True, False])
def test_products_run_at_the_padded_vocabulary(with_gradients: bool) -> None:
    """Claim (precision): the output layer multiplies at the padded vocabulary, whatever the padding
    rows contain"""
    x, weight, labels, weights = inputs(torch.bfloat16)
    sizes: set[int] = set()

    def record(operator: Any, args: tuple[Any, ...], result: Any) -> None:
        if operator in (torch.ops.aten.mm, torch.ops.aten.addmm):
            sizes.update(size for arg in args if arg.dim() == 2 for size in arg.shape)

    with Observed(record), torch.set_grad_enabled(with_gradients):
        linear_cross_entropy(x, weight, labels, weights, vocab_size=VOCAB, group=GROUP)
    assert sizes == {TOKENS, PADDED, HIDDEN}


@pytest.mark.parametrize("probability", [0.9, 0.997])
def test_label_gradient_is_rounded_once(probability: float) -> None:
    """A probability of 0.997 is 0.996 in bf16, which would make the gradient wrong by a third."""
    vocab = 8
    weight = torch.eye(vocab, dtype=torch.bfloat16, requires_grad=True)
    logit = torch.tensor(probability / (1 - probability) * (vocab - 1)).log()
    x = F.pad(logit.view(1, 1), (0, vocab - 1)).bfloat16().requires_grad_()
    label = torch.tensor([0])
    linear_cross_entropy(x, weight, label, None, vocab_size=vocab, group=GROUP)[0].backward()
    exact = x.detach().double().softmax(dim=-1) - F.one_hot(label, vocab)
    assert relative_error(x.grad, exact) < 2**-7


def test_fp16_gradient_of_many_tokens_does_not_overflow() -> None:
    """The sum over tokens exceeds fp16, the gradient of the mean does not."""
    tokens = 2**15
    x = torch.full((tokens, 8), 8.0, dtype=torch.float16)
    weight = torch.zeros((8, 8), dtype=torch.float16, requires_grad=True)
    labels = torch.zeros(tokens, dtype=torch.int64)
    loss, _ = linear_cross_entropy(x, weight, labels, None, vocab_size=8, group=GROUP)
    (loss / tokens).backward()
    torch.testing.assert_close(weight.grad[0], torch.full((8,), -7.0, dtype=torch.float16))


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        pytest.param(65536, 4096, id="equal-chunks"),
        pytest.param(4096, 4096, id="one-chunk"),
        pytest.param(3 * 4096, 4096, id="the-fewest"),
        pytest.param(65536 + 8, 5120, id="tiles-and-a-remainder"),
    ],
)
def test_chunks_of_devices_are_complete_tiles(tokens: int, rows: int) -> None:
    assert chunk_rows(tokens, 50304, 2, on_host=False) == rows


def test_chunks_on_the_host_have_the_size_of_its_cache() -> None:
    assert chunk_rows(65536, 50304, 2, on_host=True) == 2**28 // (50304 * 2)
