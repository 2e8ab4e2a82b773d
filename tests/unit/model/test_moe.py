"""The mixture-of-experts layer, compared with a loop over experts."""

from __future__ import annotations

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.problems import Problem
from megatron_ds.model.experts import grouped, permutation
from megatron_ds.model.experts.router import routers_with_bias, update_biases
from megatron_ds.model.experts.router_log import RouterLog
from megatron_ds.model.mlp import MLP
from megatron_ds.model.moe import MoE
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.mesh import Group, Mesh
from tests.independent.model import DEFAULTS, Experts
from tests.observed import Observed
from tests.problems import codes
from tests.tables import tables

TABLES = tables(__file__)

S = 7
B = 3
H = 16
E = 4
LOSSES = {"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.2}
DROPPING = {"moe_expert_capacity_factor": 0.8}

SIGMOID = {"moe_router_score_function": "sigmoid"}
BIAS = {"moe_router_enable_expert_bias": True}


def architecture(**changes: Any) -> ModelConfig:
    sizes = {"num_layers": 2, "hidden_size": H, "num_attention_heads": 2, "ffn_hidden_size": 24}
    return ModelConfig(**sizes, seq_length=S, init_method_std=0.5, **changes)


def build(moe: MoEConfig, config: ModelConfig) -> MoE:
    """A layer whose biases are not zero."""
    layer = MoE(config, moe, 0, Mesh.single(), init=Initializer(3), log=RouterLog({}))
    generator = torch.Generator().manual_seed(1)
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if name.endswith("bias"):
            tensor.data = torch.randn(tensor.shape, generator=generator)
    return layer


@pytest.mark.parametrize("options", TABLES["layers"], ids=str)
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_layer_equals_a_loop_over_experts(options: dict[str, Any], activation: str) -> None:
    """Claim (parallel): the mixture-of-experts layer equals a loop over tokens and experts,
    gradients and auxiliary losses included"""
    moe = MoEConfig(num_experts=(E,), **LOSSES, **options)
    config = architecture(activation=activation, add_bias_linear=activation == "gelu")
    layer = build(moe, config)
    x, weight = (torch.randn(S, B, H, generator=torch.Generator().manual_seed(n)) for n in (2, 3))
    options = {"num_experts": E, **LOSSES, **options, **vars(config)}
    tensors = (*layer.named_parameters(), *layer.named_buffers())
    weights = {f"mlp.{name}": tensor for name, tensor in tensors}
    reference = Experts(SimpleNamespace(**{**DEFAULTS, **options}), weights)
    runs = []
    for run in (layer, reference):
        inputs = x.clone().requires_grad_()
        layer.zero_grad()
        if run is layer:
            layer.log.gradient_scale = 0.25
            with layer.log.recording(training=True):
                y = layer(inputs)
            (y * weight).sum().backward()
            means = layer.log.take()
            auxiliary = moe.moe_aux_loss_coeff * means["load_balancing_loss"]
            auxiliary = auxiliary + moe.moe_z_loss_coeff * means["z_loss"]
        else:
            y = reference(inputs.double().transpose(0, 1), "mlp").transpose(0, 1)
            auxiliary = reference.auxiliary
            ((y * weight).sum() + 0.25 * auxiliary).backward()
        gradients = [inputs.grad, *(parameter.grad for parameter in layer.parameters())]
        runs.append([y.detach().double(), auxiliary.detach().double(), *gradients])
    for ours, expected in zip(*runs, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("options", [{}, DROPPING], ids=str)
@pytest.mark.parametrize("experts", [4, 64])
def test_calls_of_a_layer_do_not_grow_with_its_experts(
    options: dict[str, Any], experts: int
) -> None:
    """Nothing is read, for meta tensors have no values, and gradients are not accumulated.

    Claim (parallel): a layer of experts reads nothing from the device without expert parallelism,
    makes as many calls for 64 experts as for 4, and falls back to one product after the other where
    a device's grouped product is missing or wrong
    """
    config = MoEConfig(num_experts=(experts,), **LOSSES, **options)
    layer = build(config, architecture()).to(device="meta", dtype=torch.bfloat16)
    calls: list[tuple[str, tuple[Any, ...]]] = []
    x = torch.empty(S, B, H, device="meta", dtype=torch.bfloat16, requires_grad=True)
    with Observed(lambda operator, args, _: calls.append((operator.__name__, args))):
        layer(x).sum().backward()
    counts = Counter(name for name, _ in calls)
    assert counts["_grouped_mm"] == 2 + 4 + 2  # outputs, their gradients, and those of biases
    accumulating = {"index_add", "index_add_", "index_select_backward", "embedding_dense_backward"}
    assert counts.keys() & {"bincount", "nonzero", "masked_select", *accumulating} == set()
    assert [
        args for name, args in calls if name.startswith("index_put") and args[3:] == (True,)
    ] == []
    assert counts.total() <= 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cpu_sums_the_rows_that_a_gather_would_copy(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(12, H, generator=generator, dtype=dtype)
    weights = torch.rand(6, 2, generator=generator, dtype=dtype)
    index = torch.randperm(12, generator=generator).view(6, 2)
    inputs = (rows, index), (rows, index, weights)
    on_host = [permutation.sum_rows(*values) for values in inputs]
    monkeypatch.setattr(permutation, "is_host", lambda _: False)
    for ours, values in zip(on_host, inputs, strict=True):
        error = (ours - permutation.sum_rows(*values)).norm() / ours.norm()
        assert error <= torch.finfo(dtype).eps


def on_a_device(monkeypatch: pytest.MonkeyPatch, grouped_mm: Any) -> tuple[MoE, Problem | None]:
    """A layer after the trial of a device's grouped product."""
    monkeypatch.setattr(grouped, "is_host", lambda _: False)
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    layer = build(MoEConfig(num_experts=(E,)), architecture())
    return layer, grouped.try_grouped_matmuls(layer, torch.bfloat16, torch.device("cpu"))


def refuses(*_: Tensor, **__: Tensor) -> Tensor:
    raise RuntimeError("needs sm_90\nbacktrace")


def leaves_gradients_of_unused_experts(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
    result = grouped.loop_over_matmuls(a, b, offs)
    return result if b.ndim == 3 else result.masked_fill((result == 0).all(1, True), math.nan)


@pytest.mark.parametrize(
    ("grouped_mm", "reason"),
    [(refuses, "needs sm_90"), (leaves_gradients_of_unused_experts, "its relative error is nan")],
)
def test_experts_multiply_one_after_the_other_where_a_device_has_no_grouped_product(
    grouped_mm: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (parallel): a layer of experts reads nothing from the device without expert
    parallelism, makes as many calls for 64 experts as for 4, and falls back to one product after
    the other where a device's grouped product is missing or wrong"""
    layer, problem = on_a_device(monkeypatch, grouped_mm)
    assert problem is not None
    assert codes([problem]) == ["experts-one-after-another"]
    assert reason in str(problem)
    x = torch.randn(S, B, H)
    layer(x).sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    monkeypatch.undo()
    other = build(MoEConfig(num_experts=(E,)), architecture())
    other(x).sum().backward()
    for found, parameter in zip(gradients, other.parameters(), strict=True):
        torch.testing.assert_close(found, parameter.grad)


def test_a_grouped_product_that_is_right_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, problem = on_a_device(monkeypatch, torch.nn.functional.grouped_mm)
    assert problem is None
    assert layer.experts.fc_in.multiply is grouped.grouped_matmul


@pytest.mark.parametrize("sizes", [[40, 0, 17, 300, 1], [0, 1, 2], [3, 600, 0], [0, 0]], ids=str)
def test_products_of_padded_groups_are_those_of_the_groups(sizes: list[int]) -> None:
    """In bf16 on a CPU; the rows of neighbours, and nan in them, change nothing."""
    ends = torch.tensor(sizes).cumsum(0).int()
    rows = int(ends[-1])
    generator = torch.Generator().manual_seed(0)
    shapes = (rows, 8), (len(sizes), 24, 8), (rows, 24)
    x, weight, gradient = (
        torch.randn(shape, generator=generator, dtype=torch.bfloat16) for shape in shapes
    )
    for a, b in ((x, weight.mT), (gradient, weight), (gradient.t(), x)):
        product = grouped.grouped_matmul(a, b, ends)
        assert product.dtype == torch.bfloat16
        torch.testing.assert_close(product, grouped.loop_over_matmuls(a, b, ends))
    if sizes[0] > 1:
        x[0] = math.nan
        product = grouped.grouped_matmul(x, weight.mT, ends)
        assert product[0].isnan().all()
        assert not product[1:].isnan().any()


@pytest.mark.parametrize(("experts", "topk"), [(1, 1), (4, 2)])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_equal_experts_are_the_dense_layer(experts: int, topk: int, activation: str) -> None:
    """One expert, or several with the same weights, whose factors sum to 1.

    Claim (parallel): one expert, or several equal ones, are the dense layer
    """
    config = architecture(activation=activation)
    layer = build(MoEConfig(num_experts=(experts,), moe_router_topk=topk), config)
    dense = MLP(config, 0, group=Mesh.single().tp, init=Initializer(3))
    weights = dict(layer.experts.named_parameters())
    for name, parameter in dense.named_parameters():
        for expert in range(experts):
            weights[name].data[expert] = weights[name].data[0]
        parameter.data = weights[name].data[0].clone()
    x = torch.randn(S, B, H)
    y = layer(x)
    expected = dense(x)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    y.sum().backward()
    expected.sum().backward()
    for name, parameter in dense.named_parameters():
        stacked = weights[name].grad
        total = stacked.sum(0)
        torch.testing.assert_close(total, parameter.grad, rtol=1e-4, atol=1e-4)


def test_an_unused_expert_has_a_zero_gradient() -> None:
    """So the ranks of every reduction agree on which gradients there are."""
    layer = build(MoEConfig(num_experts=(E,), moe_router_topk=1), architecture())
    layer.router.weight.data.zero_()  # equal logits: one expert has every token
    layer(torch.ones(S, B, H)).sum().backward()
    gradient = layer.experts.fc_in.weight.grad
    assert sorted(bool(each.count_nonzero()) for each in gradient) == [False, False, False, True]


def test_gradients_are_those_of_weights_that_are_gathered_again() -> None:
    """ZeRO 3 frees weights between the passes, and swaps others into their buffers."""
    layer = build(MoEConfig(num_experts=(E,)), architecture())
    gradients = []
    for is_freed in (False, True):
        x = torch.ones(S, B, H, requires_grad=True)
        y = layer(x)
        if is_freed:
            for weight in layer.experts.parameters():
                values = weight.data.clone()
                weight.data.fill_(math.nan)
                weight.data = values
        y.square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_evaluation_has_a_capacity_of_its_own() -> None:
    moe = MoEConfig(num_experts=(E,), **DROPPING, moe_eval_capacity_factor=float(E))
    layer = build(moe, architecture())
    x = torch.randn(S, B, H)
    dropless = build(MoEConfig(num_experts=(E,)), architecture())(x)
    assert (layer(x) - dropless).abs().max() > 0.1
    torch.testing.assert_close(layer.eval()(x), dropless)


def test_log_has_means_over_layers_and_micro_batches_of_training() -> None:
    log = RouterLog({})
    log.record({"loss": torch.tensor(100.0)})  # of a recomputation
    for value in (1.0, 3.0):
        with log.recording(training=True):
            log.record({"loss": torch.tensor(value), "load": torch.tensor([value, 0.0])})
    with log.recording(training=False):
        log.record({"loss": torch.tensor(100.0)})
    means = log.take()
    assert means["loss"] == 2.0
    assert means["load"].tolist() == [2.0, 0.0]
    assert log.take() == {}


def test_an_experts_weights_depend_on_its_number_alone() -> None:
    """Every expert-parallel size starts from the same experts."""
    few, many = (
        build(MoEConfig(num_experts=(size,)), architecture()).experts.fc_out.weight
        for size in (2, 4)
    )
    assert torch.equal(few, many[:2])
    assert not torch.equal(many[0], many[1])


def test_a_balanced_global_batch_counts_the_micro_batches_so_far() -> None:
    """A recomputation has the loads of its first pass, not of later micro-batches."""
    options = {"moe_router_load_balancing_type": "global_aux_loss", "num_experts": E}
    layer = build(MoEConfig(**options | {"num_experts": (E,)}), architecture())
    weights = {f"mlp.{name}": tensor for name, tensor in layer.named_parameters()}
    reference = Experts(
        SimpleNamespace(**{**DEFAULTS, **LOSSES, **vars(architecture()), **options}), weights
    )
    inputs = torch.randn(3, S, B, H, generator=torch.Generator().manual_seed(2)).unbind()
    expected = []
    first = []
    for x in inputs:
        before = reference.auxiliary
        reference(x.double().transpose(0, 1), "mlp")
        expected.append((reference.auxiliary - before).item())
        with layer.log.recording(training=True):
            first.append(layer.router(x.flatten(0, 1), B))
    again = [layer.router(x.flatten(0, 1), B) for x in inputs]
    for routings in (first, again):
        losses = [0.3 * each.aux_loss.item() + 0.2 * each.z_loss.item() for each in routings]
        assert losses == pytest.approx(expected, rel=1e-5)


def test_a_bias_moves_by_the_sign_of_what_an_expert_has_too_little() -> None:
    """Of the counts of all micro-batches; a skipped step, a recomputation and an evaluation change
    nothing."""
    moe = MoEConfig(num_experts=(E,), **SIGMOID, **BIAS, moe_router_bias_update_rate=0.25)
    layer = build(moe, architecture())
    router = layer.router
    single = Mesh.single().dp
    (biased,) = routers_with_bias(layer)
    assert biased is router
    router.expert_bias.copy_(torch.tensor([9.0, 0.0, 5.0, 1.0]))
    for _ in range(2):
        with layer.log.recording(training=True):
            layer(torch.randn(S, B, H))
    layer(torch.randn(S, B, H))
    update_biases([router], single, is_applied=False)
    assert router.expert_bias.tolist() == [9.0, 0.0, 5.0, 1.0]
    for training in (True, False):
        with layer.log.recording(training=training):
            layer(torch.randn(S, B, H))
    assert int(torch.as_tensor(router.assigned_E).sum()) == moe.moe_router_topk * S * B
    update_biases([router], single, is_applied=True)
    assert router.expert_bias.tolist() == [8.75, 0.25, 4.75, 1.25]
    router.assigned_E = torch.tensor([5, 5, 5, 5])
    update_biases([router], single, is_applied=True)
    assert router.expert_bias.tolist() == [8.75, 0.25, 4.75, 1.25]
    assert router.expert_bias.dtype == layer.bfloat16().router.expert_bias.dtype == torch.float32


def test_a_bias_moves_by_the_counts_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by this rank's, of which each expert's is on the other side of the mean."""
    moe = MoEConfig(num_experts=(E,), **SIGMOID, **BIAS, moe_router_bias_update_rate=0.25)
    router = build(moe, architecture()).router
    router.expert_bias.zero_()
    router.assigned_E = torch.tensor([6, 6, 4, 4])
    monkeypatch.setattr(
        dist, "all_reduce", lambda counts, group: counts.add_(torch.tensor([[0, 0, 9, 9]]))
    )
    update_biases([router], Group((0, 1), 0, None), is_applied=True)
    assert router.expert_bias.tolist() == [0.25, 0.25, -0.25, -0.25]


def test_jitter_and_forced_routing_repeat_in_a_recomputation() -> None:
    x = torch.randn(64, H, generator=torch.Generator().manual_seed(2))
    plain, jittered, forced = (
        build(MoEConfig(num_experts=(E,), **LOSSES, **options), architecture()).router
        for options in (
            {},
            {"moe_input_jitter_eps": 0.3},
            {"moe_router_force_load_balancing": True},
        )
    )
    torch.manual_seed(1)
    first = jittered(x).weights_TK
    torch.manual_seed(1)
    assert torch.equal(jittered(x).weights_TK, first)
    torch.testing.assert_close(jittered.eval()(x).weights_TK, plain(x).weights_TK)
    assert (first - plain(x).weights_TK).abs().max() > 1e-3

    loads = forced(x).load_E
    assert torch.equal(forced(2 * x).load_E, loads)
    assert (loads - 1 / E).abs().max() < 0.1 < (plain(100 * x).load_E - 1 / E).abs().max() + 0.1
    forced(x).weights_TK.square().sum().backward()
    assert forced.weight.grad.count_nonzero() > 0
