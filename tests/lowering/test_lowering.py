"""The kernels that torch.compile makes for an H100, on a machine without a device.

`make proofs ONLY=lowering` installs torch's build for CUDA. `tests/golden/lowering.json` has the
kernels; `python -m tests.lowering.test_lowering` writes it again.

Claim (precision): compiled for an H100, the elementwise functions, the loss and the step of weights
that are rounded stochastically are one kernel each, a layer calls libraries for attention and
matrix products only, tensor-parallel ranks and the graphs around attention of ranks that share
sequences need no further kernels, but one where a graph begins again, and no kernel spills
registers
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
CUDA = REPOSITORY / "build" / "lowering"
GOLDEN = REPOSITORY / "tests" / "golden" / "lowering.json"

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(
        not (CUDA / ".installed").exists(),
        reason="needs torch's build for CUDA: make proofs ONLY=lowering",
    ),
]
Kernels = dict[str, dict[str, Any]]


def lower() -> Kernels:
    """The results of `lower.py`."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{CUDA}{os.pathsep}{REPOSITORY}",
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            "TRITON_CACHE_DIR": f"{folder}/triton",
        }
        results = Path(folder) / "kernels.json"
        command = [sys.executable, str(Path(__file__).with_name("lower.py")), str(results)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        found: Kernels = json.loads(results.read_text(encoding="utf-8"))
    return found


@pytest.fixture(scope="module")
def lowered() -> Kernels:
    return lower()


def test_no_kernel_spills_registers(lowered: Kernels) -> None:
    assert {name for name, used in lowered.items() if used["spilled bytes"]} == set()
    assert all(used["registers"] > 0 for used in lowered.values() if used["kernels"])


def test_an_elementwise_function_is_one_kernel(lowered: Kernels) -> None:
    functions = {
        name: used
        for name, used in lowered.items()
        if not any(word in name for word in ("layer", "attention", "fp8"))
    }
    assert len(functions) > 12
    assert {(used["kernels"], len(used["calls of libraries"])) for used in functions.values()} == {
        (1, 0)
    }


def test_a_layer_calls_attention_and_products_of_libraries(lowered: Kernels) -> None:
    """Two products in the backward pass for each of the forward pass."""
    layers = [name.removesuffix(", forward") for name in lowered if name.endswith("layer, forward")]
    assert len(layers) > 1
    for name in layers:
        for direction, products in (("forward", 4), ("backward", 8)):
            calls = lowered[f"{name}, {direction}"]["calls of libraries"]
            assert sum(calls.values()) == products + 1
            assert sum(number for call, number in calls.items() if "attention" in call) == 1


def test_casts_to_fp8_are_three_kernels_in_each_direction(lowered: Kernels) -> None:
    """Claim (precision): compiled for an H100, a linear layer in fp8 has three kernels more in each
    direction than one in bf16, or four if tensor-parallel ranks share scales, and at most four for
    each cast of its weight"""
    casts = {name: used for name, used in lowered.items() if name.startswith("fp8")}
    shared = {name for name in casts if name.endswith("of 2 tensor-parallel ranks")}
    assert len(shared) == 6
    assert len(casts) == 33
    for name, used in casts.items():
        kernels = used["kernels"]
        if name in shared:
            kernels += casts[f"{name}, largest values"]["kernels"]
        assert kernels <= (4 if "weights" in name or name in shared else 3), name
        assert used["calls of libraries"] == {}, name


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize(
    ("ranks", "recipe", "more"),
    [
        ("", "rowwise", 6),
        ("", "tensorwise", 8),
        (" of 2 tensor-parallel ranks", "rowwise", 9),
        (" of 2 tensor-parallel ranks", "tensorwise", 9),
    ],
)
def test_experts_in_fp8_launch_few_kernels_more(
    ranks: str, recipe: str, more: int, way: str, lowered: Kernels
) -> None:
    """Claim (precision): compiled for an H100, experts with two linear layers in fp8, whose weights
    are rounded, launch at most six kernels more in each direction than in bf16 with a scale for
    each row, eight with one for a tensor, and nine if tensor-parallel ranks share scales"""
    plain, rounded = (
        lowered[f"Llama-like 1B: layer of experts{ranks} in {precision}, {way}"]["launches"]
        for precision in ("bf16", recipe)
    )
    assert plain < rounded <= plain + more


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_a_layer_in_fp8_computes_its_casts_with_what_makes_the_numbers(
    recipe: str, lowered: Kernels
) -> None:
    """Claim (precision): compiled for an H100, a layer with four linear layers in fp8, whose
    weights are rounded, launches at most three kernels more than one in bf16 for each linear layer
    in each direction"""
    for way in ("forward", "backward"):
        plain, rounded = (
            lowered[f"Llama-like 1B: {kind}, {way}"]["launches"]
            for kind in ("layer", f"layer in fp8 {recipe}")
        )
        assert plain < rounded <= plain + 4 * 3
    for way, products in (("forward", 4), ("backward", 8)):
        calls = lowered[f"Llama-like 1B: layer in fp8 {recipe}, {way}"]["calls of libraries"]
        assert sum(number for call, number in calls.items() if "scaled_mm" in call) == products


MODELS = ("124M", "Llama-like 1B")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_tensor_parallel_layer_has_the_same_kernels_and_two_sums(
    model: str, direction: str, lowered: Kernels
) -> None:
    alone = lowered[f"{model}: layer, {direction}"]
    sharded = lowered[f"{model}: layer of 2 tensor-parallel ranks, {direction}"]
    assert sharded["kernels"] == alone["kernels"]
    assert sum(sharded["calls of libraries"].values()) == sum(alone["calls of libraries"].values())
    assert alone["collectives"] == {}
    assert sharded["collectives"] == {"all_reduce_": 2, "wait_tensor": 2}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_graphs_around_attention_have_one_kernel_more_than_the_layer_at_most(
    model: str, direction: str, lowered: Kernels
) -> None:
    layer = lowered[f"{model}: layer, {direction}"]
    parts = [lowered[f"{model}: {where} attention, {direction}"] for where in ("before", "after")]
    assert sum(part["kernels"] for part in parts) <= layer["kernels"] + 1
    products = sum(sum(part["calls of libraries"].values()) for part in parts)
    assert products == sum(layer["calls of libraries"].values()) - 1


def test_kernels_are_those_of_the_golden_file(lowered: Kernels) -> None:
    assert lowered == json.loads(GOLDEN.read_text(encoding="utf-8"))


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(lower(), indent=1) + "\n", encoding="utf-8")
