"""The command line of tools/merge_checkpoints.py: methods, formats, and what it rejects."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from pathlib import Path

import numpy
import pytest
import torch

from megatron_ds.conversion.registry import open_source, write
from megatron_ds.conversion.source import SourceCheckpoint, WriteOptions
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.loading.merge import MergeOptions, merge_sources
from megatron_ds.loading.programs import merge as merge_checkpoints
from megatron_ds.schedules import DECAY_FACTORS
from tests.problems import printed_codes
from tests.proofs.cases import rotated, with_proofs
from tests.unit.checkpoint.native_writer import random_states, write_checkpoint
from tests.unit.conftest import Run
from tests.unit.conversion.models import model, random_source

TOOL = merge_checkpoints


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Four of one model: of two layouts, a Hugging Face model, and Megatron's with two ranks."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = [
        write_checkpoint(folder / "one", random_states(1), iteration=12),
        write_checkpoint(folder / "four", random_states(2), tp=2, dp=2, stage=1),
    ]
    for seed, name in enumerate(("hf", "megatron"), 3):
        source = open_source(write_checkpoint(folder / f"{seed}", random_states(seed)))
        tp_size = 2 if name == "megatron" else 1
        write(source, folder / name, name, WriteOptions(tp_size=tp_size))
        paths.append(folder / name)
    return paths


def average(paths: Sequence[Path], weights: Sequence[float]) -> dict[str, numpy.ndarray]:
    """numpy's average in fp64, rounded to fp32, with its own sum of a mean."""
    opened = [open_source(path).tensors for path in paths]
    result = {}
    for name in opened[0]:
        values = [tensors[name].read().double().numpy() for tensors in opened]
        is_mean = len(set(weights)) == 1
        mean = numpy.mean(values, 0) if is_mean else numpy.average(values, 0, weights)
        result[name] = mean.astype(numpy.float32)
    return result


METHODS: dict[str, tuple[Sequence[str], Sequence[float]]] = {
    "mean": ([], (1, 1, 1, 1)),
    "ema": (["--method", "ema", "--decay", "0.75"], [0.421875, 0.140625, 0.1875, 0.25]),
    "wsm": (["--method", "wsm"], (1, 1, 1, 1)),
    "minus_sqrt": (
        ["--method", "wsm", "--decay-style", "minus_sqrt"],
        [0.5, 0.20710678118654757, 0.15891862259789102, 0.1339745962155614],
    ),
}


@pytest.mark.parametrize(("method", "target"), with_proofs(*rotated(METHODS, ("native", "hf"))))
def test_merged_weights_are_the_average_of_numpy(
    checkpoints: list[Path],
    tmp_path: Path,
    run: Run,
    method: str,
    target: str,
) -> None:
    """Claim (conversion): the mean, the moving average and the emulated decay of checkpoints of
    different layouts and formats are numpy's averages in fp64, rounded once, the mean to the last
    bit
    """
    flags, weights = METHODS[method]
    arguments = ("--load", *checkpoints, "--save", tmp_path / "new", "--to", target, *flags)
    assert f"wrote {tmp_path / 'new'}" in run(*arguments).out
    merged = open_source(tmp_path / "new").tensors
    expected = average(checkpoints, weights)
    assert merged.keys() == expected.keys()
    rounding = 0.0 if weights == (1, 1, 1, 1) and "wsm" not in flags else 1e-6
    for name, tensor in merged.items():
        numpy.testing.assert_allclose(
            tensor.read().numpy(), expected[name], rtol=rounding, atol=rounding, err_msg=name
        )


@pytest.mark.parametrize("style", DECAY_FACTORS)
def test_weights_of_an_emulated_decay_give_its_factors_to_the_steps(style: str) -> None:
    """Weights of checkpoints whose steps are 1, by the warmup-stable-and-merge paper.

    Step i is in the checkpoints from i on, so that it counts with the sum of their weights.
    """
    count = 5
    options = MergeOptions("wsm", merge_decay_style=style)
    weights = options.weights(range(100, 150, 10))
    counted = list(itertools.accumulate(reversed(weights)))[::-1]
    factors = [DECAY_FACTORS[style](step / count) for step in range(count)]
    assert counted == pytest.approx(factors)
    assert min(weights) >= 0
    if style == "linear":
        assert weights == pytest.approx([1 / count] * count)
        # 45 steps are of the decay.
        assert options.weights([10, 20, 40]) == pytest.approx([10 / 45, 20 / 45, 15 / 45])


def test_checkpoints_are_sorted_by_iteration(
    checkpoints: list[Path], tmp_path: Path, run: Run
) -> None:
    """The first is of iteration 12, the second of iteration 8."""
    last, first = checkpoints[:2]
    flags = ("--method", "ema", "--decay", "0", "--save", tmp_path / "new")
    run("--load", last, first, *flags)
    merged = open_source(tmp_path / "new")
    expected = open_source(last)
    assert all(
        torch.equal(tensor.read(), expected.tensors[name].read())
        for name, tensor in merged.tensors.items()
    )


def written(source: SourceCheckpoint, folder: Path, dtype: torch.dtype) -> Path:
    write(source.to(dtype), folder, "native")
    return folder


@pytest.mark.parametrize(
    ("dtypes", "flags", "expected"),
    [
        (("bfloat16", "bfloat16"), (), "bfloat16"),
        (("bfloat16", "float32"), (), "float32"),
        (("bfloat16", "bfloat16"), ("--dtype", "fp16", "--to", "hf"), "float16"),
    ],
)
def test_weights_keep_their_type_and_are_rounded_once(
    tmp_path: Path, run: Run, dtypes: Sequence[str], flags: Sequence[str], expected: str
) -> None:
    paths = [
        written(random_source(model(), seed=seed), tmp_path / f"{seed}", getattr(torch, dtype))
        for seed, dtype in enumerate(dtypes)
    ]
    errors = run("--load", *paths, "--save", tmp_path / "new", *flags).err
    assert printed_codes(errors) == ["hf-tokenizer-not-exported", "engines-differ"] * (
        "hf" in flags
    )
    opened = [open_source(path).tensors for path in paths]
    for name, tensor in open_source(tmp_path / "new").tensors.items():
        mean = torch.stack([tensors[name].read().double() for tensors in opened]).mean(0)
        assert torch.equal(tensor.read(), mean.to(getattr(torch, expected))), name


def test_parameters_with_gradients_are_merged() -> None:
    """As the files of a training have them."""
    source = random_source(model())
    parameters = {
        name: TensorReader.of(torch.nn.Parameter(tensor.read()))
        for name, tensor in source.tensors.items()
    }
    training = dataclasses.replace(source, tensors=parameters)
    merged = merge_sources([training, training], MergeOptions())
    assert not any(tensor.read().requires_grad for tensor in merged.tensors.values())


def test_what_cannot_be_merged_is_rejected(
    checkpoints: list[Path], tmp_path: Path, run: Run
) -> None:
    """Two models with every difference, and an output that exists, which is kept."""
    wide = random_source(model(num_layers=3, activation="swiglu"))
    for name in ("wide", "taken"):
        written(wide, tmp_path / name, torch.float32)
    arguments = ("--load", checkpoints[0], tmp_path / "wide", "--save", tmp_path / "new")
    errors = run(*arguments, status=1).err
    assert set(printed_codes(errors)) == {"merge-model-differs"}
    for name in ("num_layers", "hidden_size", "activation", "vocab_size", "ffn_hidden_size"):
        assert re.search(rf"wide: {name} is ", errors), name
    before = {path: path.read_bytes() for path in (tmp_path / "taken").iterdir()}
    arguments = ("--load", *checkpoints[:2], "--save", tmp_path / "taken")
    assert printed_codes(run(*arguments, status=1).err) == ["output-folder-not-empty"]
    assert before == {path: path.read_bytes() for path in (tmp_path / "taken").iterdir()}
    arguments = ("--load", checkpoints[0], "--save", tmp_path / "new")
    assert printed_codes(run(*arguments, status=2).err) == ["one-checkpoint-to-merge"]
    assert not (tmp_path / "new").exists()
