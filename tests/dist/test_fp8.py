"""Linear layers in fp8 on several ranks round the numbers of one process.

The layers are compared bit for bit: their numbers are such that all sums are exact, and that a rank
alone would choose another scale. A training cannot be: a sum that is rounded elsewhere may change
to which of two neighbours a number is rounded. The training of one process amplifies rounding
errors in the same way, and `compare.Tolerance` measures how much.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ds.parallel.collectives import copy_to_group, sum_over_group
from megatron_ds.parallel.fp8.grouped import Fp8Experts, Parts
from megatron_ds.parallel.fp8.linear import Fp8Linear, Fp8Recipe
from megatron_ds.parallel.fp8.rounding import E4M3, E5M2
from megatron_ds.parallel.mesh import Group, Mesh
from tests.dist.compare import differences
from tests.dist.parity_cases import Case, config_of, plans_of, samples_of, train_alone
from tests.dist.rank_jobs import JobResults, Jobs, case_training, has_proofs, run_jobs
from tests.dist.reference import Run, train_reference
from tests.distributed import run_ranks
from tests.proofs.cases import with_proofs

SCALES: tuple[dict[str, Any], ...] = (
    {"by_row": False},
    {"by_row": True},
    {"by_row": False, "block": 4},
)
"""Arguments of recipes: one scale, those of rows, and those of blocks."""
FEATURES = 16
TOKENS = (4, 2)
"""Sequence length and micro-batch."""
ALONE = Mesh.single().tp


def case(
    recipe: str, *, stage: int = 1, tp: int = 1, accumulation: int = 4, **options: Any
) -> Case:
    """A training on two ranks, in fp32 around the linear layers."""
    precision: dict[str, Any] = {
        "fp8_format": "hybrid",
        "fp8_recipe": recipe,
        "fp8_min_features": 1,
    }
    if recipe == "blockwise":
        precision["fp8_block_size"] = 2
    changes = {"precision": precision, **options.pop("changes", {})}
    return Case(2, stage, tp, accumulation, "learned", "sgd", changes=changes, **options)


SEQUENCE = {"parallel": {"sequence_parallel": True}}
MOE = {
    "num_experts": (4,),
    "moe_router_topk": 2,
    "moe_aux_loss_coeff": 0.1,
    "moe_ffn_hidden_size": 32,
}
EXPERTS_OF_RANKS = {"moe": MOE}
RECOMPUTED = {"recompute": {"recompute_granularity": "full"}}
CASES = {
    "zero3": case("tensorwise", stage=3),
    "zero2-recomputed": case("rowwise", stage=2, changes=RECOMPUTED),
    "sequence": case("tensorwise", stage=3, tp=2, changes=SEQUENCE),
    "pp2": case("tensorwise", pp=2),
    "cp2": case("rowwise", cp=2),
    "tp2-blockwise": case("blockwise", tp=2, changes=SEQUENCE),
    "ep2": case("rowwise", ep=2, stage=2, changes=EXPERTS_OF_RANKS),
    "tp2": case("rowwise", tp=2),
    "sp2": case("tensorwise", sp=2),
    "zero1": case("tensorwise", accumulation=2),
    "zero1-rowwise": case("rowwise", accumulation=2),
    "zero3-tp2-rowwise": case("rowwise", stage=3, tp=2, changes=SEQUENCE),
    "pp2-rowwise": case("rowwise", pp=2, changes=RECOMPUTED),
    "sp2-rowwise": case("rowwise", sp=2, stage=3),
    "cp2-tensorwise": case("tensorwise", cp=2, stage=2),
    "zero3-blockwise": case("blockwise", stage=3, changes=RECOMPUTED),
    "pp2-blockwise": case("blockwise", pp=2),
    "sp2-blockwise": case("blockwise", sp=2, stage=3),
    "cp2-blockwise": case("blockwise", cp=2, stage=2),
    "ep2-tensorwise": case("tensorwise", ep=2, changes=EXPERTS_OF_RANKS),
}
"""Trainings by name."""
PROOFS = list(CASES)[7:]
"""Those that only proofs run."""


def draw(rows: int, columns: int, seed: int, by_row: bool) -> Tensor:
    """A matrix of numbers between 1 and 5, and of 7: in each row or once, in the first half.

    With scale 7 / 448 = 2^-6, or another of the second half alone, a sum of products is exact: the
    numbers of a range differ by a factor of up to 7.
    """
    generator = torch.Generator().manual_seed(seed)
    x = 1 + 4 * torch.rand(rows, columns, generator=generator)
    for row in range(rows if by_row else 1):
        x[row, row % (columns // 2)] = 7.0
    return x * torch.randn(rows, columns, generator=generator).sign()


def activations(seed: int, by_row: bool, *, over_tokens: bool = False) -> Tensor:
    """[S, B, features], with 7 in the first half of the features, or of the sequence."""
    tokens = TOKENS[0] * TOKENS[1]
    if over_tokens:
        return draw(FEATURES, tokens, seed, by_row).t().reshape(*TOKENS, FEATURES)
    return draw(tokens, FEATURES, seed, by_row).view(*TOKENS, FEATURES)


def computed(
    recipe: Fp8Recipe,
    group: Group,
    sharded: int,
    *operands: Tensor,
    grad: Tensor,
    is_traced: bool = False,
) -> list[Tensor]:
    """Output and gradients of a layer; of one that is traced, in one graph with its casts."""
    leaves = [operand.detach().clone().requires_grad_() for operand in operands]
    x, weight, bias = (*leaves, None)[:3]
    layer: Any = Fp8Linear(recipe, group, sharded)
    if is_traced:
        layer.prepare(weight)
        torch.compiler.reset()
        layer = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=False)
    y = layer(x, weight, bias)
    y.backward(grad)
    gradients = [leaf.grad for leaf in leaves]
    assert all(gradient is not None for gradient in gradients)
    return [y.detach(), *gradients]  # type: ignore[list-item]


def shard(x: Tensor, dim: int, group: Group) -> Tensor:
    return x.chunk(group.size, dim)[group.rank].contiguous()


def check_tensor_parallel_layers(group: Group, *, is_traced: bool = False) -> None:
    bias = torch.arange(16.0)
    formats = (E5M2,) if is_traced else (E4M3, E5M2)
    for scales, gradients, sharded, in_sequence in itertools.product(
        SCALES, formats, (0, 1), (False, True)
    ):
        ranks = dataclasses.replace(group, sequence_parallel=in_sequence)
        by_row = bool(scales["by_row"])
        recipe = Fp8Recipe(gradients, tokens=ALONE, **scales)
        x = activations(1, by_row)
        grad = activations(2, by_row)
        weight = draw(FEATURES, FEATURES, 3, by_row)
        weight = weight.t().contiguous() if sharded == 0 else weight
        y, grad_x, grad_weight, grad_bias = computed(
            recipe, ALONE, sharded, x, weight, bias, grad=grad
        )
        # Features are sharded on one side of the layer, the sequence on the other.
        inside = [2] if sharded == 0 else [0] * in_sequence
        outside = [0] * in_sequence if sharded == 0 else [2]

        def part(tensor: Tensor, dims: list[int], ranks: Group = ranks) -> Tensor:
            return shard(tensor, dims[0], ranks) if dims else tensor

        biases = [bias, grad_bias]
        if sharded == 0:
            biases = [shard(tensor, 0, ranks) for tensor in biases]
        found = computed(
            recipe,
            ranks,
            sharded,
            part(x, outside),
            shard(weight, sharded, ranks),
            biases[0],
            grad=part(grad, inside),
            is_traced=is_traced,
        )
        wanted = part(y, inside), part(grad_x, outside), shard(grad_weight, sharded, ranks)
        for name, one, other in zip("yxwb", found, (*wanted, biases[1]), strict=True):
            assert torch.equal(one, other), (name, scales, gradients, sharded, in_sequence)


def check_shared_sequences(group: Group, *, is_traced: bool = False) -> None:
    formats = (E5M2,) if is_traced else (E4M3, E5M2)
    for scales, gradients in itertools.product(SCALES, formats):
        by_row = bool(scales["by_row"])
        x = activations(1, by_row, over_tokens=True)
        grad = activations(2, by_row, over_tokens=True)
        weight = draw(FEATURES, FEATURES, 3, by_row)
        alone = Fp8Recipe(gradients, tokens=ALONE, **scales)
        wanted = computed(alone, ALONE, 0, x, weight, grad=grad)
        recipe = Fp8Recipe(gradients, tokens=group, **scales)
        parts = shard(x, 0, group), weight
        y, grad_x, grad_weight = computed(
            recipe, ALONE, 0, *parts, grad=shard(grad, 0, group), is_traced=is_traced
        )
        assert torch.equal(y, shard(wanted[0], 0, group)), (scales, gradients)
        assert torch.equal(grad_x, shard(wanted[1], 0, group)), (scales, gradients)
        assert torch.equal(sum_over_group(grad_weight, group), wanted[2]), (scales, gradients)


EXPERTS = 2
ROWS = 8
"""Rows of each expert."""


def computed_experts(
    recipe: Fp8Recipe, group: Group, sharded: int, *operands: Tensor, grad: Tensor
) -> list[Tensor]:
    """Output and gradients of experts, each with as many rows."""
    x, weight = (operand.detach().clone().requires_grad_() for operand in operands)
    counts = torch.tensor([len(x) // EXPERTS] * EXPERTS)
    inputs = copy_to_group(x, group) if sharded == 1 else x
    parts = Parts.of(recipe, counts, len(x))
    y = Fp8Experts(recipe, group, sharded)(inputs, weight, None, parts)
    y.backward(grad)
    assert x.grad is not None
    assert weight.grad is not None
    return [y.detach(), x.grad, weight.grad]


def check_experts(group: Group) -> None:
    for gradients, sharded, by_row in itertools.product((E4M3, E5M2), (1, 2), (False, True)):
        weights = [draw(FEATURES, FEATURES, 3 + index, by_row) for index in range(EXPERTS)]
        weight = torch.stack(weights)
        recipe = Fp8Recipe(gradients, by_row, ALONE)
        x = torch.cat([draw(ROWS, FEATURES, 10 + index, by_row) for index in range(EXPERTS)])
        grad = torch.cat([draw(ROWS, FEATURES, 20 + index, by_row) for index in range(EXPERTS)])
        full = weight.mT.contiguous() if sharded == 1 else weight
        y, grad_x, grad_weight = computed_experts(recipe, ALONE, sharded, x, full, grad=grad)
        shards = shard(full, sharded, group)
        wanted = [y, grad_x, shard(grad_weight, sharded, group)]
        if sharded == 1:
            operands = x, shards
            gradient = shard(grad, 1, group)
            wanted[0] = shard(y, 1, group)
        else:
            operands = shard(x, 1, group), shards
            gradient = grad
            wanted[1] = shard(grad_x, 1, group)
        found = computed_experts(recipe, group, sharded, *operands, grad=gradient)
        for name, one, other in zip("yxw", found, wanted, strict=True):
            assert torch.equal(one, other), (name, gradients, sharded, by_row)


def check_experts_of_shared_sequences(group: Group) -> None:
    def of_experts(seed: int, by_row: bool) -> Tensor:
        parts = [draw(FEATURES, ROWS, seed + index, by_row).t() for index in range(EXPERTS)]
        return torch.cat(parts)

    def part(tensor: Tensor) -> Tensor:
        return shard(tensor.view(EXPERTS, ROWS, FEATURES), 1, group).flatten(0, 1)

    for gradients, by_row in itertools.product((E4M3, E5M2), (False, True)):
        weights = [draw(FEATURES, FEATURES, 3 + index, by_row) for index in range(EXPERTS)]
        weight = torch.stack(weights)
        x, grad = (of_experts(seed, by_row) for seed in (10, 20))
        alone = Fp8Recipe(gradients, by_row, ALONE)
        wanted = computed_experts(alone, ALONE, 1, x, weight, grad=grad)
        recipe = Fp8Recipe(gradients, by_row, group)
        found = computed_experts(recipe, ALONE, 1, part(x), weight, grad=part(grad))
        assert torch.equal(found[0], part(wanted[0])), (gradients, by_row)
        assert torch.equal(found[1], part(wanted[1])), (gradients, by_row)
        assert torch.equal(sum_over_group(found[2], group), wanted[2]), (gradients, by_row)


def check_layers(rank: int) -> None:
    group = Mesh.build(tp_size=2).tp
    check_experts(group)
    check_experts_of_shared_sequences(group)
    check_tensor_parallel_layers(group)
    check_shared_sequences(group)


def test_layers_on_two_ranks_equal_one_process_bit_for_bit() -> None:
    """Claim (precision): linear layers in fp8 round the same numbers to the same ones on two
    tensor-parallel ranks, with `--sequence-parallel`, and on ranks that share sequences, bit for
    bit; so do experts"""
    run_ranks(check_layers, 2)


def check_traced_layers(rank: int) -> None:
    group = Mesh.build(tp_size=2).tp
    check_tensor_parallel_layers(group, is_traced=True)
    check_shared_sequences(group, is_traced=True)


@pytest.mark.proof
def test_traced_layers_on_two_ranks_equal_one_process_bit_for_bit() -> None:
    """Claim (precision): so do layers whose casts are in the graph of a compiled layer"""
    run_ranks(check_traced_layers, 2)


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> JobResults:
    names = [name for name in CASES if has_proofs(request) or name not in PROOFS]
    return run_jobs(2, Jobs((name, case_training(CASES[name])) for name in names))


def moved_alone(trained: Case, seed: int) -> Run:
    """The run of one process, from a start that is moved by rounding."""
    config = config_of(trained)
    size = config.schedule.micro_batch_size
    return train_reference(config, samples_of(trained), plans_of(trained), size, moved=seed)


@pytest.mark.parametrize("name", with_proofs(CASES, PROOFS))
def test_trainings_on_two_ranks_equal_one_process(name: str, outcomes: JobResults) -> None:
    """Claim (precision): with linear layers in fp8, ZeRO stages, tensor, pipeline, sequence and
    context parallelism, recomputation and accumulation train like one process with the same
    micro-batches; differences are within 1e-5, or those of rounding errors in one process"""
    trained = CASES[name]
    moved = functools.partial(moved_alone, trained)
    reference = train_alone(trained)
    assert outcomes.differences(name, reference, moved) == []
    exact = train_alone(dataclasses.replace(trained, changes={}))
    assert differences(exact, reference) != []
