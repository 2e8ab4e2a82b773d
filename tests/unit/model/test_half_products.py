"""Products in half precision on CPUs without instructions for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ds.model.kernels import half_products
from megatron_ds.model.kernels.half_products import replace_slow_products
from tests.problems import codes

CPU = torch.device("cpu")
BF16 = torch.bfloat16
FP16 = torch.float16
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(params=[BF16, FP16])
def replaced(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[torch.dtype]:
    """A type whose kernels are replaced, also where the CPU has instructions for it."""
    monkeypatch.setattr(half_products, "has_instructions", lambda dtype: False)
    was_replaced = half_products._replace.cache_info().currsize > 0
    assert codes([replace_slow_products(request.param, CPU)]) == ["half-products-in-fp32"]
    yield request.param
    if not was_replaced:
        half_products._replace(request.param)._destroy()
        half_products._replace.cache_clear()


def into(product: Callable[..., Tensor]) -> Product:
    return lambda a, b, _: product(a, b, out=torch.empty(0, dtype=a.dtype))


@pytest.mark.parametrize(
    "product",
    [
        pytest.param(lambda a, b, c: a[0] @ b[0], id="mm"),
        pytest.param(lambda a, b, c: torch.addmm(c[0], a[0], b[0], beta=2), id="addmm"),
        pytest.param(lambda a, b, c: F.linear(a, b[0].t(), c[0, 0]), id="linear"),
        pytest.param(lambda a, b, c: a @ b, id="bmm"),
        pytest.param(lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.5), id="baddbmm"),
        pytest.param(lambda a, b, c: into(torch.mm)(a[0], b[0], c), id="mm-out"),
        pytest.param(into(torch.bmm), id="bmm-out"),
    ],
)
def test_products_are_those_of_fp64_rounded_once(product: Product, replaced: torch.dtype) -> None:
    """Claim (precision): products in half precision on CPUs without instructions for it are rounded
    once"""
    generator = torch.Generator().manual_seed(1)
    a, b, c = (torch.randn(3, 64, 64, generator=generator).to(replaced) for _ in range(3))
    actual = product(a, b, c)
    exact = product(a.double(), b.double(), c.double())
    # The sums in fp32 round a few results to the neighbour of the nearest value.
    unequal = actual != exact.to(replaced)
    assert actual.dtype == replaced
    assert unequal.float().mean() < 5e-3
    torch.testing.assert_close(actual.double(), exact, rtol=torch.finfo(replaced).eps, atol=1e-3)


def test_gradients_are_products_in_fp32_too(replaced: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x, weight, gradient = (torch.randn(48, 48, generator=generator).to(replaced) for _ in range(3))
    F.linear(x.requires_grad_(), weight.requires_grad_()).backward(gradient)
    exact = (gradient.double() @ weight.double(), gradient.double().t() @ x.double())
    for actual, expected in zip((x.grad, weight.grad), exact, strict=True):
        assert (actual != expected.to(replaced)).float().mean() < 5e-3


@pytest.mark.parametrize("mask", [False, True])
def test_attention_has_the_gradients_of_fp64(mask: bool, replaced: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    heads = [torch.randn(2, 2, 32, 16, generator=generator).to(replaced) for _ in range(3)]
    bias = torch.zeros(32, 32).masked_fill(torch.ones(32, 32).triu(1).bool(), -torch.inf)

    def run(dtype: torch.dtype) -> list[Tensor]:
        inputs = [one.to(dtype).detach().requires_grad_() for one in heads]
        options = {"attn_mask": bias.to(dtype)} if mask else {"is_causal": True}
        out = F.scaled_dot_product_attention(*inputs, **options)
        out.sum().backward()
        return [out, *(one.grad for one in inputs)]

    limit = 8 * torch.finfo(replaced).eps
    for actual, expected in zip(run(replaced), run(torch.float64), strict=True):
        assert actual.dtype == replaced
        torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


def test_other_types_keep_their_kernels(replaced: torch.dtype) -> None:
    x = torch.randn(16, 16, dtype=torch.float64)
    assert torch.equal(x @ x, torch.mm(x, x, out=torch.empty_like(x)))
    assert (x.int() @ x.int()).dtype == torch.int32


def test_nothing_is_replaced_where_nothing_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert replace_slow_products(torch.float32, CPU) is None
    assert replace_slow_products(BF16, torch.device("meta")) is None
    monkeypatch.setattr(half_products, "has_instructions", lambda dtype: True)
    assert replace_slow_products(BF16, CPU) is None


def test_a_torch_without_the_interfaces_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(half_products, "has_instructions", lambda dtype: False)
    monkeypatch.setattr(half_products, "_replace", lambda dtype: torch.library.no_such_function)
    assert codes([replace_slow_products(BF16, CPU)]) == ["slow-half-products"]
