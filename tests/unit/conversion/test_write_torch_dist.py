"""Checkpoints written for Megatron Core: read back, and by torch alone as its layout describes."""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from megatron_ds.checkpoint.metadata import read_run
from megatron_ds.config import ModelConfig
from megatron_ds.config.problems import user_error
from megatron_ds.conversion.convert import with_training
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.megatron.write_legacy import write_megatron
from megatron_ds.conversion.megatron.write_torch_dist import write_torch_dist
from megatron_ds.conversion.native import source_of
from megatron_ds.conversion.registry import recognize
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint, WriteOptions
from megatron_ds.engine.states.state_reader import MASTER, TensorReader
from tests.problems import raises_problem
from tests.unit.checkpoint.native_writer import random_states
from tests.unit.checkpoint.native_writer import write_checkpoint as write_native
from tests.unit.conversion.megatron_writer import core_entries
from tests.unit.conversion.models import (
    OTHER_LLAMA,
    assert_same_tensors,
    model,
    random_source,
    random_training,
)

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "llama": {
        "activation": "swiglu",
        "ffn_hidden_size": 24,
        "num_query_groups": 2,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "kv_channels": 6,
        "rotary_base": 5000.0,
    },
    "groups, biases and a tied table": {
        "num_query_groups": 2,
        "position_embedding_type": "rope",
        "rotary_interleaved": True,
        "use_rope_scaling": True,
        "no_rope_freq": "4",
    },
}


def trained(config: ModelConfig, dtype: torch.dtype) -> SourceCheckpoint:
    source = random_source(config)
    return dataclasses.replace(source, **random_training(config)).checked().to(dtype)


@pytest.mark.parametrize(
    ("changes", "tp_size"), list(zip(MODELS.values(), (1, 2, 2), strict=True)), ids=MODELS
)
def test_an_export_is_read_back(changes: dict[str, Any], tp_size: int, tmp_path: Path) -> None:
    source = random_source(model(**changes))
    write_torch_dist(source, tmp_path / "out", WriteOptions(tp_size=tp_size))

    read = open_megatron(tmp_path / "out").weights()

    assert recognize(tmp_path / "out").name == "torch_dist"
    assert read.path.name == "release"
    assert read.settings.fixed == source.settings.fixed
    assert_same_tensors(read, source)


@pytest.mark.parametrize(
    ("layout", "adam", "dtype"),
    [
        ("torch_dist", "fused", torch.bfloat16),
        ("torch_dist", "torch", torch.float32),
        ((2, 1), "fused", torch.float32),
        ((2, 2), "torch", torch.bfloat16),
    ],
)
def test_the_states_of_a_training_are_read_back(
    layout: Any, adam: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """As torch_dist, and as files of tensor-parallel ranks and pipeline stages. With torch's Adam
    the table is tied, so that the last stage has a copy of it.

    Claim (checkpoints): what is written for Megatron Core is read back bit for bit, optimizer
    states included, and by torch's own reader as Core's layout describes
    """
    source = trained(model(**(OTHER_LLAMA if adam == "fused" else {})), dtype)
    if layout == "torch_dist":
        write_torch_dist(source, tmp_path / "out", WriteOptions(adam=adam))
    else:
        sizes = dict(zip(("tp_size", "pp_size"), layout, strict=True))
        write_megatron(source, tmp_path / "out", WriteOptions(adam=adam, **sizes))

    found = open_megatron(tmp_path / "out")
    assert found.path.name == "iter_0000007"
    read = with_training(found)

    assert_same_tensors(read, source)
    assert (MASTER in source.optimizer) == (dtype == torch.bfloat16)
    assert read.run == source.run, "steps, samples, arguments, schedule"
    assert read.optimizer.keys() == source.optimizer.keys()
    for kind, tensors in source.optimizer.items():
        own = dataclasses.replace(source, tensors=tensors)
        assert_same_tensors(dataclasses.replace(read, tensors=read.optimizer[kind]), own)


def read_by_torch(folder: Path) -> dict[str, Tensor]:
    """Every entry with a tensor, by torch's own reader."""
    reader = dcp.FileSystemReader(folder)
    entries = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.full(tuple(entry.size), torch.nan, dtype=entry.properties.dtype)
        for key, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(state, storage_reader=reader, no_dist=True)
    return state


@pytest.mark.parametrize("changes", [{}, OTHER_LLAMA], ids=["gpt", "llama"])
def test_entries_are_those_that_the_layout_describes(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    """Layers are the first axis, and the rows of QKV are ordered by key-value head.

    Claim (checkpoints): what is written for Megatron Core is read back bit for bit, optimizer
    states included, and by torch's own reader as Core's layout describes
    """
    config = model(**changes)
    source = trained(config, torch.bfloat16)
    write_torch_dist(source, tmp_path / "out", WriteOptions(tp_size=2, adam="torch"))
    folder = tmp_path / "out" / "iter_0000007"
    state = read_by_torch(folder)
    weights = {key: value for key, value in state.items() if not key.startswith("optimizer.")}

    def entries(of: dict[str, Tensor]) -> dict[str, Tensor]:
        tables = ("embedding.word.weight", "head.weight")  # of 50 rows, in multiples of 128 x 2
        padded = {name: F.pad(of[name], (0, 0, 0, 206)) for name in tables if name in of}
        return core_entries(config, of | padded)

    check_equal(weights, entries(values_of(source.tensors)))
    kinds = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": MASTER}
    for saved, kind in kinds.items():
        prefix = f"optimizer.state.{saved}."
        own = {key.removeprefix(prefix): each for key, each in state.items() if prefix in key}
        check_equal(own, entries(values_of(source.optimizer[kind])))
    assert len(state) == 4 * len(weights)


def values_of(tensors: Any) -> dict[str, Tensor]:
    return {name: tensor.read() for name, tensor in tensors.items()}


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


def test_objects_and_common_values_are_those_of_megatron(tmp_path: Path) -> None:
    source = trained(model(), torch.float32)
    write_torch_dist(source, tmp_path / "out", WriteOptions(tp_size=2, pp_size=2))
    assert (tmp_path / "out" / "latest_checkpointed_iteration.txt").read_text() == "7"
    folder = tmp_path / "out" / "iter_0000007"
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    modules = ("self_attention.linear_qkv", "self_attention.linear_proj")
    for module in (*modules, "mlp.linear_fc1", "mlp.linear_fc2"):
        for layer in range(4):
            key = f"decoder.layers.{module}._extra_state/shard_{layer}_4"
            place = stored[MetadataIndex(key)]
            with open(folder / place.relative_path, "rb") as file:
                file.seek(place.offset)
                content = file.read(place.length)
            (tmp_path / "object").write_bytes(content)
            assert torch.load(tmp_path / "object") == [None]
    common = torch.load(folder / "common.pt", weights_only=False)
    args = common["args"]
    assert isinstance(args, Namespace)
    assert (args.consumed_train_samples, args.iteration, common["iteration"]) == (28, 7, 7)
    assert (args.tensor_model_parallel_size, args.pipeline_model_parallel_size) == (2, 2)
    assert (args.padded_vocab_size, args.no_save_optim, args.no_save_rng) == (256, False, True)
    groups = common["optimizer"]["param_groups"]
    assert [group["wd_mult"] for group in groups] == [1.0, 0.0]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [group["step"] for group in groups] == [6, 6]
    assert common["opt_param_scheduler"]["num_steps"] == 24


def test_padding_that_was_trained_is_kept(tmp_path: Path) -> None:
    """As in a run of Megatron that was continued here; without training there is none."""
    config = model()
    padded = model(vocab_size=64)
    source = dataclasses.replace(
        random_source(config), tensors=random_source(padded).tensors, **random_training(padded)
    )
    write_torch_dist(source.checked().to(torch.float32), tmp_path / "out", WriteOptions(tp_size=2))
    state = read_by_torch(tmp_path / "out" / "iter_0000007")
    table = random_training(padded)["optimizer"][MASTER]["embedding.word.weight"].read()
    assert torch.equal(state["embedding.word_embeddings.weight"], table)
    read = with_training(open_megatron(tmp_path / "out"))
    assert read.settings.model.vocab_size == 50
    assert torch.equal(read.tensors["embedding.word.weight"].read(), table)


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    source = trained(model(**OTHER_LLAMA), torch.bfloat16)
    alive: list[weakref.ref[Tensor]] = []
    most = 0

    def counted(tensor: TensorReader) -> TensorReader:
        def read() -> Tensor:
            nonlocal most
            most = max(most, sum(each() is not None for each in alive))
            value = tensor.read().clone()
            alive.append(weakref.ref(value))
            return value

        return TensorReader.full(tensor.shape, tensor.dtype, read)

    optimizer = {
        kind: {name: counted(tensor) for name, tensor in tensors.items()}
        for kind, tensors in source.optimizer.items()
    }
    tensors = {name: counted(tensor) for name, tensor in source.tensors.items()}
    done: list[int] = []
    write_torch_dist(
        dataclasses.replace(source, tensors=tensors, optimizer=optimizer),
        tmp_path / "out",
        on_tensor=lambda name, size: done.append(size),
    )
    assert len(alive) == 4 * len(source.tensors)
    assert most <= 1
    assert sum(done) == source.nbytes


@pytest.mark.parametrize("error", [OSError(28, "full"), KeyboardInterrupt(), None])
def test_an_error_leaves_nothing(error: BaseException | None, tmp_path: Path) -> None:
    """The error is that of the tensor, and not torch's."""
    source = random_source(model())
    error = error or user_error("checkpoint-file-missing", name="here")

    def read() -> Tensor:
        raise error

    last = "final_norm.bias"
    broken = TensorReader.full(source.tensors[last].shape, torch.float32, read)
    source = dataclasses.replace(source, tensors={**source.tensors, last: broken})
    with pytest.raises(type(error)):
        write_torch_dist(source, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_weights_alone_have_no_states(tmp_path: Path) -> None:
    write_torch_dist(random_source(model()), tmp_path / "out")
    with raises_problem("conversion-without-states", contains="no optimizer states"):
        with_training(open_megatron(tmp_path / "out"))


@pytest.mark.parametrize(
    ("optimizer", "has_optimizer", "reason"),
    [("sgd", True, "is sgd"), ("adam", False, "saved without them")],
)
def test_trainings_whose_states_megatron_cannot_take_are_rejected(
    optimizer: str, has_optimizer: bool, reason: str, tmp_path: Path
) -> None:
    saved = read_run(write_native(tmp_path, random_states()))
    layout = dataclasses.replace(saved.run.layout, optimizer=optimizer)
    record = dataclasses.replace(saved.run, layout=layout, has_optimizer=has_optimizer)
    options = ReadOptions(optimizer=True, checksums=False)
    source = source_of(dataclasses.replace(saved, run=record), options)
    with raises_problem("conversion-without-states", contains=reason):
        with_training(source)
