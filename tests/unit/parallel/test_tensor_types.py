"""The types of tensors on the ranks are checked, and mistakes are reported with file and line."""

from __future__ import annotations

import ast
import inspect
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import megatron_ds
from megatron_ds.config import support_matrix
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel import linear, sharding
from megatron_ds.parallel.mesh import Group
from megatron_ds.parallel.weights import Partial, Role, ShardSpec, Weight

PACKAGE = Path(megatron_ds.__file__).parent
TABLE = PACKAGE / "parallel" / "tensor_types.toml"
WIDTH = 20
INNER = 16
RANKS = 8
TP = 2
INNER_FUNCTIONS = {
    "_concatenate",
    "_sum_slices",
    "_exchange",
    "_with_host_sum",
    "gather_objects",
    "update_biases",
}
"""Functions with a collective that only declared ones call, or that send no tensor of a pass."""


def declared() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def operators_in(path: Path) -> Iterator[tuple[str, bool]]:
    """Functions and autograd functions of a module that communicate or have a backward pass, and
    whether the latter is written by hand."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        text = ast.unparse(node)
        if isinstance(node, ast.ClassDef) and "autograd.Function" in map(ast.unparse, node.bases):
            yield node.name, True
        elif isinstance(node, ast.Assign) and "in_graph(" in text:
            yield ast.unparse(node.targets[0]), True
        elif isinstance(node, ast.FunctionDef) and "dist.all_" in text and "group" in text:
            yield node.name, False


def test_every_operator_is_declared_with_its_backward_pass() -> None:
    """Claim (parallel): Every operator that communicates, and every backward pass that is written
    by hand, declares how its tensors lie on the ranks of each axis."""
    table = declared()
    missing = []
    paths = [*(PACKAGE / "parallel").glob("*.py"), *(PACKAGE / "model").rglob("*.py")]
    for path in paths:
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for name, has_backward in operators_in(path):
            entry = table.get(f"{module}.{name}", {})
            is_complete = bool(entry) and (
                not has_backward or any("backward" in key for key in entry)
            )
            if not is_complete and name not in INNER_FUNCTIONS:
                missing.append(f"{module}.{name}")
    assert missing == []
    assert len(table) > 30


def test_backward_passes_state_the_types_that_follow_from_the_forward_passes() -> None:
    pytest.importorskip("spmd_types", reason="needs spmd_types")
    from tests.typed.declared import operators, resolve

    stated = 0
    for operator in operators().values():
        assert resolve(operator.name)[2] is not None
        for key, text in operator.backward.items():
            assert text == operator.types[key].stated_backward(), operator.name
            stated += 1
    assert stated > 15


class Layers(nn.Module):
    """A scale, and two sharded products."""

    def __init__(self, group: Group) -> None:
        super().__init__()
        init = Initializer(1)
        rows = ShardSpec(0, (INNER,))
        columns = ShardSpec(1, (INNER,))
        vector: dict[str, Any] = {"role": Role.VECTOR}
        self.scale = sharding.declared_parameter(
            Weight("scale", (WIDTH,), partial_over=Partial.SEQUENCE, **vector), group, init
        )
        self.column = linear.ColumnParallelLinear(
            Weight("column.weight", (INNER, WIDTH), shard=rows, std=0.1, role=Role.MATRIX),
            Weight("column.bias", (INNER,), shard=rows, **vector),
            group=group,
            init=init,
        )
        self.row = linear.RowParallelLinear(
            Weight("row.weight", (WIDTH, INNER), shard=columns, std=0.1, role=Role.MATRIX),
            Weight("row.bias", (WIDTH,), **vector),
            group=group,
            init=init,
        )


def right(layers: Layers, x: Tensor) -> Tensor:
    return x + layers.row(F.gelu(layers.column(x * layers.scale)))


def without_reduction(layers: Layers, x: Tensor) -> Tensor:
    inner = F.gelu(layers.column(x * layers.scale))
    return x + F.linear(inner, layers.row.weight)  # wrong


def bias_before_reduction(layers: Layers, x: Tensor) -> Tensor:
    inner = F.gelu(layers.column(x * layers.scale))
    y = F.linear(inner, layers.row.weight, layers.row.bias)  # wrong
    return x + linear.reduce_from_group_(y, layers.row.group)


def relu_of_partial_sum(layers: Layers, x: Tensor) -> Tensor:
    inner = layers.column(x * layers.scale)
    y = F.relu(F.linear(inner, layers.row.weight))  # wrong
    return x + linear.reduce_from_group_(y, layers.row.group)


def gradient_without_reduction(layers: Layers, x: Tensor) -> Tensor:
    inner = x.detach() * layers.scale  # wrong
    return x.detach() + layers.row(F.linear(inner, layers.column.weight))


def reduced_twice(layers: Layers, x: Tensor) -> Tensor:
    y = layers.row(layers.column(x * layers.scale))
    return x + linear.reduce_from_group_(y, layers.row.group)  # wrong


def check(
    function: Callable[[Layers, Tensor], Tensor],
    *,
    sequence_parallel: bool = False,
    ranks: int = RANKS,
) -> None:
    from tests.typed import runs
    from tests.typed.declared import Declared, checked

    with runs.fake_mesh(ranks, tp=TP) as axes:
        axes.mesh = axes.mesh.of_model(sequence_parallel)
        layers = Layers(axes.mesh.tp)

        def run(checker: Any) -> None:
            runs.with_parameters(checker, layers)
            stream = "varying 0" if sequence_parallel else "invariant"
            types = [("tp", Declared.parse(stream)), ("edp", Declared.parse("varying 1"))]
            x = torch.ones(4, 3, WIDTH, requires_grad=True)
            runs.typed(checker, x, **{axis: each.type for axis, each in types})
            x = checked(checker, x, types, "the input", "")
            checked(checker, function(layers, x), types, "the output", "").sum().backward()
            runs.check_gradients(checker, layers)

        runs.check(axes, run)


def error_of(function: Callable[[Layers, Tensor], Tensor], **options: Any) -> str:
    from tests.typed.checker import TypesError

    with pytest.raises(TypesError) as error:
        check(function, **options)
    return str(error.value)


def line_of(function: Callable[..., Any]) -> str:
    lines, first = inspect.getsourcelines(function)
    at = next(at for at, line in enumerate(lines) if "# wrong" in line)
    return f"tests/unit/parallel/test_tensor_types.py:{first + at}: "


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_without_mistakes_pass(sequence_parallel: bool) -> None:
    pytest.importorskip("spmd_types", reason="needs spmd_types")
    check(right, sequence_parallel=sequence_parallel)
    check(right, sequence_parallel=sequence_parallel, ranks=4096)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_reduction, "a partial sum is added"),
        (bias_before_reduction, "a partial sum is added"),
        (relu_of_partial_sum, "a nonlinear function of a partial sum"),
        (gradient_without_reduction, "the gradient of scale is partial on the tp axis"),
        (reduced_twice, "is replicated on the tp axis; it is declared partial"),
    ],
)
def test_a_mistake_is_reported_with_file_and_line(function: Any, reason: str) -> None:
    """Claim (parallel): A forgotten all-reduce, a bias added before a reduction, a nonlinear
    function of a partial sum, a sum that is reduced twice, and a gradient without its reduction are
    errors with file and line, found without running numbers."""
    pytest.importorskip("spmd_types", reason="needs spmd_types")
    message = error_of(function)
    assert message.startswith(line_of(function)), message
    assert reason in message


def test_backward_passes_written_by_hand_are_checked_against_the_forward_passes() -> None:
    """Claim (parallel): Backward passes that are written by hand are checked against the types of
    the forward pass."""
    pytest.importorskip("spmd_types", reason="needs spmd_types")
    with mock.patch.object(linear, "start_all_reduce_", return_value=None):
        message = error_of(right)
    assert message.startswith("megatron_ds/parallel/linear.py:")
    assert "the gradient of x of _ColumnParallel is partial" in message
    with mock.patch.object(sharding, "sum_over_group", lambda x, group: x):
        message = error_of(right, sequence_parallel=True)
    assert message.startswith("tests/unit/parallel/test_tensor_types.py:")
    assert "the gradient of scale is partial" in message


@pytest.mark.parametrize(
    ("mistake", "part", "weight"),
    [
        (
            mock.patch("megatron_ds.model.declaration.latent.SEQUENCE", Partial.NEVER),
            "latent attention",
            "attention.q_down.weight",
        ),
        (
            mock.patch("megatron_ds.model.moe.replace", lambda weight, **_: weight),
            "whole experts",
            "mlp.latent_in.weight",
        ),
    ],
)
def test_a_part_of_the_model_without_its_reduction_is_reported(
    mistake: Any, part: str, weight: str
) -> None:
    pytest.importorskip("spmd_types", reason="needs spmd_types")
    from tests.typed import cases
    from tests.typed.checker import TypesError

    run, changes = cases.FURTHER[f"{part}, sequence"]
    with mistake, pytest.raises(TypesError, match=f"{weight} is partial on the tp axis"):
        cases.check(run, *cases.WORLDS[0], **changes)


FURTHER = {
    "stages, whole experts, latent attention and prediction": "all, stages",
    "kinds of exchange by layer": "kinds of exchange by layer, context",
}
LAYOUTS: dict[str, dict[str, str]] = {
    "tensor and sequence": {"tp": support_matrix.MANY, "sequence": "on", "model": "llama"},
    "tensor and Ulysses": {"tp": support_matrix.MANY, "sp": support_matrix.MANY, "model": "gqa"},
    "context parallel, Ulysses and sequence": {
        **dict.fromkeys(("cp", "sp", "tp"), support_matrix.MANY),
        "sequence": "on",
        "model": "alibi",
        "world": "8",
    },
}


@pytest.mark.parametrize("name", [*LAYOUTS, *FURTHER])
def test_the_model_lies_on_the_ranks_as_declared(name: str) -> None:
    pytest.importorskip("spmd_types", reason="needs spmd_types")
    from tests.typed import cases

    run, changes = (
        cases.FURTHER[FURTHER[name]] if name in FURTHER else (cases.layout(**LAYOUTS[name]), {})
    )
    cases.check(run, *cases.WORLDS[0], **changes)
