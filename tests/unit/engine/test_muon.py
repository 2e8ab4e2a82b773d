"""Updates of Muon and SOAP, and which rank computes them; optimizers of other packages."""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import pytest
import torch

from megatron_ds.config import OptimizerConfig
from megatron_ds.engine.optimizers import matrix_optimizer
from megatron_ds.engine.optimizers.build import client_optimizer
from megatron_ds.engine.optimizers.cautious_decay import decay_cautiously
from megatron_ds.engine.optimizers.distributed_matrices import (
    DistributedMatrices,
    MatrixShard,
    Owner,
    assign_owners,
)
from megatron_ds.engine.optimizers.muon import COEFFICIENTS, Muon, iterations, orthogonalize
from megatron_ds.engine.optimizers.soap import SOAP, eigenvalue_order
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.weights import ShardSpec
from tests.dist.reference import Soap
from tests.observed import Observed
from tests.problems import raises_problem

SETTINGS = {"lr": 0.02, "weight_decay": 0.1}
DEFAULTS = {"coefficient_type": "simple", "neuron_beta": None}
DEFAULTS |= {"scale_mode": "spectral", "scale_factor": 0.2}


def piece_of(weight: torch.nn.Parameter, sections: tuple[int, ...]) -> MatrixShard:
    """A matrix that one process has whole."""
    whole = (range(weight.numel()),)
    shape = (len(weight), weight.shape[1])
    place = slice(0, weight.numel())
    return MatrixShard(shape, ShardSpec(0, sections), weight, place, whole, whole, Owner(0, 0))


def muon_of(weight: torch.nn.Parameter, *sections: int, dtype: torch.dtype, **scale: Any) -> Muon:
    optimizer = Muon(
        [{"params": [weight], "is_matrix": True}],
        betas=(0.9, 0.99),
        eps=1e-8,
        fused=False,
        momentum=0.9,
        nesterov=True,
        steps=5,
        **{**DEFAULTS, **SETTINGS, **scale},
    )
    return attached(optimizer, weight, sections, dtype)


def soap_of(weight: torch.nn.Parameter, *sections: int, **options: Any) -> SOAP:
    settings = {"shampoo_beta": 0.8, "precondition_frequency": 2, "betas": (0.9, 0.95)}
    groups = [{"params": [weight], "is_matrix": True}]
    optimizer = SOAP(groups, **{**settings, "eps": 1e-3, **SETTINGS, **options})
    return attached(optimizer, weight, sections, torch.float32)


def attached(
    optimizer: Any, weight: torch.nn.Parameter, sections: tuple[int, ...], dtype: torch.dtype
) -> Any:
    """The optimizer of a matrix that one process has whole."""
    mesh = Mesh.single()
    pieces = [piece_of(weight, sections or (len(weight),))]
    optimizer.attach([DistributedMatrices(pieces, mesh.dp, mesh.tp, torch.empty(0, dtype=dtype))])
    return optimizer


def stepped(optimizer: torch.optim.Optimizer, steps: int = 3) -> torch.Tensor:
    """The weight after some steps with random gradients."""
    (weight,) = optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()
    result: torch.Tensor = weight.detach()
    return result


@pytest.mark.parametrize("shape", [(24, 8), (8, 24), (16, 16)])
@pytest.mark.parametrize(
    ("adjust", "scale"),
    [("match_rms_adamw", {}), ("original", {"scale_mode": "shape_scaling", "scale_factor": 1.0})],
)
def test_update_is_that_of_torch(shape: tuple[int, int], adjust: str, scale: dict) -> None:
    """Claim (precision): Muon's update equals `torch.optim.Muon`'s"""
    reference = getattr(torch.optim, "Muon", None)
    if reference is None:
        pytest.skip("torch.optim.Muon needs torch 2.9")
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    expected = torch.nn.Parameter(start.clone())
    theirs = stepped(reference([expected], momentum=0.9, adjust_lr_fn=adjust, **SETTINGS))
    ours = muon_of(torch.nn.Parameter(start.clone()), dtype=torch.bfloat16, **scale)
    change = (theirs - start).abs().max()
    assert (stepped(ours) - theirs).abs().max() < 0.01 * change


def test_singular_values_come_close_to_one() -> None:
    matrix = torch.randn(40, 24, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(matrix, 5))
    assert values.min() > 0.6
    assert values.max() < 1.3


@pytest.mark.parametrize(
    ("coefficients", "steps", "smallest", "error"),
    [("quintic", 5, 0.02, 0.2), ("polar_express", 5, 0.02, 0.15), ("polar_express", 9, 1e-3, 1e-3)],
)
def test_coefficients_of_each_iteration_bring_singular_values_closer_to_one(
    coefficients: str, steps: int, smallest: float, error: float
) -> None:
    values = torch.cat([torch.ones(1), torch.logspace(math.log10(smallest), 0, 40)])
    values = values.double() / values.norm()
    result = torch.linalg.svdvals(orthogonalize(values.diag(), steps, coefficients))
    assert (result - 1).abs().max() < error
    if coefficients == "quintic":
        assert iterations("quintic", 7) == [*COEFFICIENTS["quintic"], *COEFFICIENTS["quintic"][:2]]


def test_fused_matrices_are_orthogonalized_and_scaled_by_themselves() -> None:
    start = torch.randn(20, 12, generator=torch.Generator().manual_seed(3))
    fused = stepped(muon_of(torch.nn.Parameter(start.clone()), 16, 4, dtype=torch.float32), 1)
    gradient = torch.randn(20, 12, generator=torch.Generator().manual_seed(5))
    for rows in (slice(0, 16), slice(16, 20)):
        update = orthogonalize(gradient[rows], 5)
        scale = 0.2 * math.sqrt(max(update.shape))
        expected = start[rows] * (1 - 0.02 * 0.1) - 0.02 * scale * update
        torch.testing.assert_close(fused[rows], expected)


def test_matrices_of_one_shape_are_updated_together_as_each_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of stacked, fused and single matrices, in batches of at most two.

    Claim (precision): matrices of one shape, single, fused or stacked, are orthogonalized together,
    as each by itself
    """
    monkeypatch.setattr(matrix_optimizer, "MATRIX_BATCH", 2 * 16 * 12)
    start = torch.randn(3 * 20 + 16, 12, generator=torch.Generator().manual_seed(3))
    whole = torch.nn.Parameter(start.clone())
    optimizer = muon_of(whole, dtype=torch.float32)
    stacked = slice(0, 3 * 20 * 12)
    single = slice(3 * 20 * 12, whole.numel())
    shapes: list[tuple[tuple[int, ...], tuple[int, ...], slice]] = [
        ((3, 20, 12), (16, 4), stacked),
        ((16, 12), (), single),
    ]
    pieces = []
    for shape, sections, place in shapes:
        own = (range(place.stop - place.start),)
        spec = ShardSpec(1, sections) if sections else None
        pieces.append(MatrixShard(shape, spec, whole, place, own, own, Owner(0, 0)))
    mesh = Mesh.single()
    optimizer.attach([DistributedMatrices(pieces, mesh.dp, mesh.tp, torch.empty(0))])
    products: list[object] = []
    with Observed(lambda operator, *_: products.append(operator)):
        found = stepped(optimizer, 1)
    gradient = torch.randn(whole.shape, generator=torch.Generator().manual_seed(5))
    starts = [0, 16, 20, 36, 40, 56, 60, 76]
    for rows in itertools.starmap(slice, itertools.pairwise(starts)):
        update = orthogonalize(gradient[rows], 5)
        scale = 0.2 * math.sqrt(max(update.shape))
        expected = start[rows] * (1 - 0.02 * 0.1) - 0.02 * scale * update
        torch.testing.assert_close(found[rows], expected)
    # Two batches of two matrices [16, 12] and one of three [4, 12], with five iterations.
    assert products.count(torch.ops.aten.baddbmm) == 3 * 5 * 2


def test_neurons_are_normalized_by_their_second_moments() -> None:
    """Claim (precision): NorMuon's update, with cautious weight decay, is that of its paper"""
    start = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    options = {"neuron_beta": 0.8, "weight_decay": 0.5}
    optimizer = muon_of(torch.nn.Parameter(start.clone()), dtype=torch.float32, **options)
    decay_cautiously(optimizer)
    found = stepped(optimizer, 2)
    generator = torch.Generator().manual_seed(5)
    momentum = torch.zeros(6, 4)
    second = torch.zeros(6, 1)
    weight = start.clone()
    for _ in range(2):
        gradient = torch.randn(6, 4, generator=generator)
        momentum = 0.9 * momentum + 0.1 * gradient
        update = orthogonalize(0.9 * momentum + 0.1 * gradient, 5)
        second = 0.8 * second + 0.2 * update.square().mean(1, keepdim=True)
        update = update / (second.sqrt() + 1e-8)
        update *= 0.2 * 24**0.5 / update.norm()
        weight = weight - 0.02 * (update + 0.5 * weight * (update * weight >= 0))
    torch.testing.assert_close(found, weight)


@pytest.mark.parametrize("rows", [6, 12, 20])
def test_soap_is_adam_in_the_eigenbasis_of_the_smaller_side(rows: int) -> None:
    """Of two fused matrices, over two new eigenbases; the first step changes states alone.

    Claim (precision): SOAP's update of a matrix is that of its paper and its authors' code with the
    eigenbasis of the smaller side, in every step and for each of fused matrices
    """
    start = torch.randn(rows + 6, 12, generator=torch.Generator().manual_seed(3))
    optimizer = soap_of(torch.nn.Parameter(start.clone()), rows, 6)
    assert torch.equal(stepped(optimizer, 1), start)
    found = stepped(soap_of(torch.nn.Parameter(start.clone()), rows, 6), 6)
    generator = torch.Generator().manual_seed(5)
    gradients = [torch.randn(start.shape, generator=generator).double() for _ in range(6)]
    adam = {"adam_beta2": 0.95, "adam_eps": 1e-3}
    options = OptimizerConfig(
        lr=0.02, optimizer="soap", soap_shampoo_beta=0.8, soap_precondition_frequency=2, **adam
    )
    for part in (slice(0, rows), slice(rows, rows + 6)):
        twin = Soap([{"params": [torch.zeros(1)]}], [], options)
        expected = start[part].double()
        for gradient in gradients:
            update = twin._step_of(gradient[part], (0, 0))
            if update is not None:
                expected = expected * (1 - 0.02 * 0.1) - 0.02 * update
        torch.testing.assert_close(found[part].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("estimates", "order"),
    [
        ([1.0, 3.0, 2.0], [1, 2, 0]),
        ([1.0, 1.0 + 5e-7, 2.0], [2, 0, 1]),
        ([1.0, 1.0 + 5e-6, 2.0], [2, 1, 0]),
        ([1e-9, 1.000002e-9, 2e-9, 1.0], [3, 2, 1, 0]),
        ([0.5, 0.0, -0.0, 0.0, 1.0], [4, 0, 1, 2, 3]),
        ([1.0, 1.0 + 5e-7, 1.0 + 1e-6, 1.0 + 15e-7], [0, 1, 2, 3]),  # each within 1e-6 of the next
    ],
)
def test_soap_leaves_columns_with_nearly_equal_estimates_in_place(
    estimates: list[float], order: list[int]
) -> None:
    """Claim (precision): SOAP sorts its eigenbasis by estimates of the eigenvalues, of which two
    within a relative 1e-6 do not change places, whatever rounding makes of them"""
    generator = torch.Generator().manual_seed(1)
    values = torch.tensor([estimates] * 50)
    moved = values * (1 + 6e-8 * torch.randn(values.shape, generator=generator))
    for found in (*eigenvalue_order(values), *eigenvalue_order(moved)):
        assert found.tolist() == order


def test_unit_rms_scale_follows_the_aspect_ratio() -> None:
    start = torch.zeros(4, 16)
    options = {"scale_mode": "unit_rms_norm", "scale_factor": 1.0, "lr": 1.0}
    weight = stepped(muon_of(torch.nn.Parameter(start), dtype=torch.float32, **options), 1)
    gradient = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(weight, -0.5 * orthogonalize(gradient, 5))


def test_8_bit_moments_need_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with raises_problem("bitsandbytes-not-installed"):
        client_optimizer({"type": "bitsandbytes.AdamW8bit", "params": {}})


def test_ranks_share_the_work() -> None:
    shapes = [(64, 32)] * 6 + [(32, 32)] * 8
    owners = assign_owners(shapes, dp_size=2, tp_size=2)
    work: dict[Owner, int] = {}
    for (rows, columns), owner in zip(shapes, owners, strict=True):
        work[owner] = work.get(owner, 0) + rows * columns * min(rows, columns)
    assert len(work) == 4
    assert max(work.values()) <= 1.2 * min(work.values())
