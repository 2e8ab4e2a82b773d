"""Attention by scores, which compiled graphs on a CPU compute in bf16, beside torch's kernel; the
order in which torch's kernels are considered on a device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megatron_ds.model.attention import cores as attention_cores
from megatron_ds.model.attention.backends import AttentionOptions, EagerBackend, SDPABackend
from megatron_ds.model.attention.cores import (
    BACKENDS,
    FIXED_SIZES,
    SDPA,
    SHORT,
    VARYING_SIZES,
    EagerAttention,
    Order,
)
from megatron_ds.model.attention.logits import LargestLogits
from megatron_ds.model.attention.masks import MaskTables, ragged_bias
from megatron_ds.model.attention.packed import (
    AttentionBackend,
    FlexKernel,
    Keys,
    PackingOptions,
    PerDocumentBackend,
    PerDocumentSDPA,
)
from megatron_ds.model.attention.rule import AttentionRule
from megatron_ds.parallel.mesh import Mesh
from tests.unit.model.dense import dense_flex

HEAD_SIZE = 8
CPU = torch.device("cpu")
SLOPES = [0.1, 0.2, 0.3, 0.4]


def traced(core: SDPA, dropout: float) -> tuple[Callable[..., Any], list[str]]:
    """The core in a graph, and the names of what the graph calls."""
    torch._dynamo.reset()
    called: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        called.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    attend = partial(core.attend, dropout=dropout)
    return torch.compile(attend, backend=backend, fullgraph=True, dynamic=False), called


def draw(heads: int, length: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, heads, length, HEAD_SIZE, generator=generator, dtype=torch.float64)
    return values.to(dtype).requires_grad_()


def results(attend: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """The output and the gradients, in fp64."""
    output = attend(*inputs)
    weights = torch.linspace(-1.0, 1.0, output.numel()).view_as(output)
    gradients = torch.autograd.grad((output.double() * weights).sum(), inputs)
    return [output.detach().double(), *(one.double() for one in gradients)]


@pytest.mark.parametrize("groups", [4, 2])
def test_scores_give_what_the_kernel_gives(groups: int) -> None:
    inputs = [draw(4, 9, torch.bfloat16, 1), *(draw(groups, 9, torch.bfloat16, s) for s in (2, 3))]
    attend, called = traced(SDPA(is_causal=True), 0.0)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    expected = results(
        partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True), *exact
    )
    for value, reference in zip(results(attend, *inputs), expected, strict=True):
        assert (value - reference).norm() < 1e-2 * reference.norm()
    assert not any("scaled_dot_product" in name for name in called)


@pytest.mark.parametrize(
    ("dtype", "length", "dropout", "is_causal"),
    [
        (torch.float32, 9, 0.0, True),
        (torch.bfloat16, SHORT + 1, 0.0, True),
        (torch.bfloat16, 9, 0.5, True),
        (torch.bfloat16, 9, 0.0, False),
    ],
)
def test_otherwise_a_graph_calls_the_kernel(
    dtype: torch.dtype, length: int, dropout: float, is_causal: bool
) -> None:
    attend, called = traced(SDPA(is_causal=is_causal), dropout)
    attend(*(draw(2, length, dtype, seed) for seed in range(3)))
    assert any("scaled_dot_product" in name for name in called)


@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("slopes", [None, torch.tensor([0.01, 0.02, 0.03, 0.04])])
def test_attention_to_a_cache_does_not_depend_on_what_is_computed_with_it(
    groups: int, slopes: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = 3
    length = 300
    size = 64
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(1, 4, length, size, generator=generator).expand(texts, -1, -1, -1)
    cache = torch.randn(2, 1, groups, 384, size, generator=generator).repeat(1, texts, 1, 1, 1)

    def attend(texts: int, start: int, end: int, keys: int) -> Tensor:
        positions = torch.arange(start, end).expand(texts, -1)
        core = EagerAttention(ragged_bias(positions, keys, torch.float32, slopes))
        k, v = cache[:, :texts, :, :keys]
        return core.attend(q[:texts, :, start:end], k, v, 0.0)[0]

    whole = attend(texts, 0, length, 384)
    bias = ragged_bias(torch.arange(length)[None], 384, torch.float32, slopes)
    k, v = cache[:, :1]
    (expected,) = F.scaled_dot_product_attention(q[:1], k, v, bias, enable_gqa=True)
    torch.testing.assert_close(whole, expected)
    monkeypatch.setattr(attention_cores, "SCORES_AT_ONCE", 2**14)
    parts = torch.cat([attend(1, 0, 51, 64), attend(2, 51, length, 320)], dim=1)
    tokens = [[attend(n, t, t + 1, keys) for t in (7, 299)] for n, keys in ((1, 320), (3, 384))]
    for one, other in ((parts, whole), tuple(torch.cat(each, dim=1) for each in tokens)):
        torch.testing.assert_close(one, other)
        # All are equal with the processors tried; SDPA gives other bits to a third of `parts`.
        assert (one == other).float().mean() > 0.98


def by_definition(
    rule: AttentionRule, doc_ids: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor
) -> Tensor:
    """Attention with all scores."""
    k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
    scores = q @ k.transpose(-1, -2) * (rule.scale or q.shape[-1] ** -0.5)
    if rule.softcap is not None:
        scores = (scores / rule.softcap).tanh() * rule.softcap
    at = torch.arange(q.shape[2])
    distance = at.unsqueeze(1) - at
    scores = scores - rule.alibi * torch.tensor(SLOPES).double().view(-1, 1, 1) * distance
    hidden = (distance < 0) | (distance >= (rule.window or len(at)))
    if doc_ids is not None:
        hidden = hidden | (doc_ids.unsqueeze(2) != doc_ids.unsqueeze(1)).unsqueeze(1)
    weights = scores.masked_fill(hidden, -torch.inf).exp()
    total = weights.sum(-1, keepdim=True)
    for sink in sinks:
        total = total + sink.view(-1, 1, 1).exp()
    return weights / total @ v


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize(
    "rule",
    [
        AttentionRule(scale=0.6),
        AttentionRule(softcap=1.5),
        AttentionRule(sinks=True),
        AttentionRule(window=3, scale=0.6),
        AttentionRule(window=5, alibi=True),
        AttentionRule(window=4, alibi=True, scale=0.6, softcap=1.5, sinks=True),
    ],
    ids=str,
)
def test_every_backend_computes_a_rule_or_refuses_it(
    rule: AttentionRule, has_documents: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients, of keys and values of different sizes, in several blocks."""
    monkeypatch.setattr(attention_cores, "SCORES_AT_ONCE", 2**10)
    rows = torch.tensor([[5, 6, 0, 8, 0, 5, 6, 7, 8, 9, 5], [0, *[7] * 10]])
    documents = PackingOptions(False, True).documents(rows == 0) if has_documents else None
    keys = Keys(rows.shape[1], torch.float32, CPU, has_documents, documents)
    inputs = [draw(heads, 11, torch.float32, seed) for heads, seed in ((4, 1), (2, 2), (2, 3))]
    inputs[2] = inputs[2].detach()[..., :6].requires_grad_()
    if rule.sinks:
        inputs.append(torch.tensor([-1.0, 0.0, 0.5, 2.0], requires_grad=True))
    exact = [one.detach().double().requires_grad_() for one in inputs]
    doc_ids = None if documents is None else documents.doc_ids_BS
    expected = results(partial(by_definition, rule, doc_ids), *exact)
    backends = SDPABackend(), PerDocumentBackend(), FlexKernel(dense_flex), EagerBackend()
    computed = []
    for backend in backends:
        if not backend.supports(rule, keys):
            continue
        computed.append(type(backend))
        core: Any = backend.core(rule, keys, MaskTables(SLOPES))
        attend = lambda q, k, v, *sinks, core=core: core.attend(q, k, v, 0.0, *sinks)  # noqa: E731
        if isinstance(backend, SDPABackend) and has_documents:
            continue  # without documents, as the table has `PerDocumentBackend` before it
        for value, reference in zip(results(attend, *inputs), expected, strict=True):
            torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)
    needs_scores = rule.softcap is not None or rule.sinks
    eager = [] if needs_scores else [SDPABackend, *[PerDocumentBackend] * has_documents]
    has_flex = has_documents or needs_scores or rule.window is not None
    flex = [FlexKernel] if has_flex else []
    assert computed == [*eager, *flex, EagerBackend]
    assert (
        type(AttentionOptions().backend(rule, keys))
        is [*eager, EagerBackend][-1 if needs_scores else has_documents]
    )


@pytest.mark.parametrize("backend", [SDPABackend(), EagerBackend()], ids=str)
def test_the_cost_of_a_window_is_in_proportion_to_the_length(backend: AttentionBackend) -> None:
    costs = []
    for length in (64, 128, 256):
        keys = Keys(length, torch.float32, CPU)
        core = backend.core(AttentionRule(window=8), keys, MaskTables(SLOPES))
        qkv = [draw(heads, length, torch.float32, 1) for heads in (4, 2, 2)]
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            core.attend(*qkv, 0.0).sum().backward()
        costs.append(counter.get_total_flops())
    assert 0 < costs[1] - costs[0] == (costs[2] - costs[1]) / 2


def test_explicit_scores_drop_weights_of_the_softmax_and_keep_no_scores() -> None:
    """Unit vectors as values give the weights; the backward pass drops the same ones."""
    length = 64
    q, k = (draw(2, length, torch.float32, seed) for seed in (1, 2))
    v = torch.eye(length).expand(2, 2, -1, -1).clone().requires_grad_()
    core = EagerAttention(ragged_bias(torch.arange(length)[None], length, torch.float32))
    saved: list[Tensor] = []
    torch.manual_seed(5)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        dropped = core.attend(q, k, v, 0.25)
    whole = core.attend(q, k, v, 0.0)
    is_kept = dropped != 0
    share = is_kept.sum() / (whole > 0).sum()
    assert 0.7 < share < 0.8
    torch.testing.assert_close(dropped, is_kept * whole / 0.75)
    (gradient,) = torch.autograd.grad(dropped.sum(), v)
    torch.testing.assert_close(gradient, dropped.transpose(-1, -2).sum(-1, True).expand_as(v))
    assert all(part.numel() <= v.numel() for part in saved)


@pytest.mark.parametrize("heads_of_bias", [1, 4])
@pytest.mark.parametrize("texts_of_bias", [1, 3])
def test_grouped_queries_on_devices_read_the_cache_in_place(
    heads_of_bias: int, texts_of_bias: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And give what copies of the keys and values give."""
    heads = 4
    groups = 2
    length = 50
    size = 64
    generator = torch.Generator().manual_seed(1)
    q, cache, noise = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in (
            (1, 3, heads, size),
            (2, 3, groups, 64, size),
            (texts_of_bias, heads_of_bias, 1, length),
        )
    )
    q = q.permute(1, 2, 0, 3)
    k, v = cache[..., :length, :]
    bias = noise.masked_fill(noise > 1.0, -torch.inf)
    called: list[tuple[Tensor, ...]] = []
    kernel = F.scaled_dot_product_attention

    def attend(*arguments: Any, **options: Any) -> Tensor:
        called.append(arguments[:3])
        return kernel(*arguments, **options)

    expected = kernel(q, *(each.repeat_interleave(2, dim=1) for each in (k, v)), bias)
    monkeypatch.setattr(attention_cores, "is_host", lambda kind: False)
    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    torch.testing.assert_close(SDPA(bias).attend(q, k, v, 0.0), expected, rtol=0.0, atol=1e-14)
    ((_, keys, values),) = called
    assert (keys.data_ptr(), values.data_ptr()) == (k.data_ptr(), v.data_ptr())


@pytest.mark.parametrize("order", [FIXED_SIZES, VARYING_SIZES, (BACKENDS["efficient"],), ()])
def test_a_core_passes_its_kernels_in_order(order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    """For the call only, and in a graph, too. The kernels of a CPU are left to torch."""
    considered = partial(torch.nn.attention._cur_sdpa_kernel_backends, with_priority=True)
    before = considered()
    seen: list[Any] = []

    def attention(q: Tensor, *_: Any, **__: Any) -> Tensor:
        seen.append((q.device.type, considered()))
        return q

    cores = SDPA(is_causal=True, backends=order), PerDocumentSDPA([[3, 5]] * 2, None, order)
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attention)
        for device in ("meta", "cpu"):
            q = torch.zeros(2, 4, 8, HEAD_SIZE, device=device)
            for core in cores:
                core.attend(q, q, q, 0.0)
    assert all(used == (list(order) or before) for device, used in seen if device == "meta")
    assert all(used == before for device, used in seen if device == "cpu")
    assert len(seen) == 6  # the documents of 3 and 5 tokens separately
    assert considered() == before
    attend, called = traced(cores[0], 0.0)
    q = torch.zeros(2, 4, 8, HEAD_SIZE, device="meta")
    attend(q, q, q)
    assert sum("_sdpa_kernel" in name for name in called) == (2 if order else 0)
    assert considered() == before


@pytest.mark.parametrize("window", [None, 1, 3, 9])
def test_largest_logits_are_those_of_keys_that_are_seen(window: int | None) -> None:
    """Of causal attention with a window: each query sees itself and the window - 1 keys before."""
    length = 9
    heads = 6
    keys = 3
    rule = AttentionRule(window=window, scale=0.3)
    expected = torch.full((heads,), -torch.inf, dtype=torch.float64)
    largest = LargestLogits(heads, Mesh.single().ulysses, Mesh.single().cp)
    for seed in (1, 2):
        q = draw(heads, length, torch.float32, seed)
        k = draw(keys, length, torch.float32, seed + 2)
        # The largest product of each query is with a key that is too old by one.
        shift = window or length
        k = k + 5 * q[:, :: heads // keys].roll(-shift, dims=2)
        largest.record(q, k, rule)
        for head, query in itertools.product(range(heads), range(length)):
            first = 0 if window is None else max(0, query - window + 1)
            seen = k[:, head // (heads // keys), first : query + 1].double()
            logits = 0.3 * torch.einsum("bd,bkd->bk", q[:, head, query].double(), seen)
            expected[head] = expected[head].maximum(logits.max())
    torch.testing.assert_close(largest.take(CPU).double(), expected, rtol=1e-5, atol=1e-5)
    assert largest.take(CPU).tolist() == [-torch.inf] * heads
