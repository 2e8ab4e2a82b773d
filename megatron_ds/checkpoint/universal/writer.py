"""Writes DeepSpeed's universal format: full tensors of every parameter and of its states.

`checkpoint/universal/folders.py` has the files. What DeepSpeed's own loader needs to shard a tensor
for tensor parallelism is declared in the same file: the dimension, and the matrices that are fused
along it. One tensor at a time is in memory.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from torch import Tensor

from megatron_ds.checkpoint.files.local_files import files_damaged, find_damaged_files, write_files
from megatron_ds.checkpoint.files.native_reader import SavedStates
from megatron_ds.checkpoint.files.native_settings import model_config
from megatron_ds.checkpoint.folders.output_folder import OnTensor, output_folder
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    TOKENIZER,
    Checkpoint,
    check_names,
    lock_for_reading,
    manifest_text,
    read_manifest,
    read_run,
)
from megatron_ds.checkpoint.universal.folders import (
    FP32,
    OPTIMIZER_STATE,
    POINTER,
    STEP,
    ZERO,
    is_universal,
)
from megatron_ds.checkpoint.universal.reader import PARAM
from megatron_ds.config.options.optimizer_specs import is_bound_to_layout
from megatron_ds.config.problems import user_error
from megatron_ds.engine.deepspeed.checkpoint_io import write_tensors
from megatron_ds.engine.states.resharding import BLOCK
from megatron_ds.engine.states.state_reader import MASTER, VOCABULARY_TABLES, StateReader
from megatron_ds.fileio.atomic import FileRecord, write_atomically
from megatron_ds.parallel.weights import ShardSpec

INFO = "universal_checkpoint_info"
VERSION = 0.4
"""Version of the format, as DeepSpeed 0.19 numbers it."""
STATE_FILES = ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt")
"""Names under which DeepSpeed looks for its counters, below ZeRO 3 and with it."""


@dataclass(frozen=True)
class UniversalContent:
    """The records that are written besides the states of the parameters."""

    specs: Mapping[str, ShardSpec]
    """Sharded parameters."""
    rows: int
    """Rows of the vocabulary tables without padding."""
    experts: frozenset[str]
    """Parameters whose dimension 0 counts experts that were sharded."""
    run: Mapping[str, Any]
    """Entries of DeepSpeed's file of the run, counters included."""
    optimizer: Mapping[str, Any]
    """Entries of DeepSpeed's file of the optimizer."""


def convert_checkpoint(checkpoint: Checkpoint, folder: Path, on_tensor: OnTensor) -> None:
    """Converts a checkpoint of this program, and makes the pointer in the parent folder name it.

    Args:
        checkpoint: The checkpoint, of any layout.
        folder: New folder.
        on_tensor: Called with name and bytes of each tensor that was written.

    Raises:
        UserError: If the folder has files already, or the states depend on the layout.
        OSError: If the disk fails.
    """
    run = checkpoint.run
    if is_bound_to_layout(run.layout.optimizer):
        raise user_error("universal-8-bit-moments", path=checkpoint.path)
    states = SavedStates(checkpoint, has_optimizer=run.has_optimizer)
    content = UniversalContent(
        specs={name: ShardSpec(shard.dim, shard.sections) for name, shard in run.shards.items()},
        rows=model_config(checkpoint).softmax_rows,
        experts=frozenset(run.experts),
        run=states.run_settings,
        optimizer=states.optimizer_settings,
    )
    with output_folder(folder) as temporary:
        records = write_states(temporary, states, content, on_tensor)
        copied = (checkpoint.path / RUN, *(checkpoint.path / TOKENIZER).glob("**/*"))
        names = [str(path.relative_to(checkpoint.path)) for path in copied if path.is_file()]
        texts = {name: (checkpoint.path / name).read_bytes() for name in names}
        records |= write_files(temporary, texts)
        write_atomically(temporary / MANIFEST, manifest_text(records).encode())
    write_atomically(folder.absolute().with_name(POINTER), folder.name.encode())


def open_verified(path: Path) -> Checkpoint:
    """The checkpoint in a folder, all of whose files match its checksums.

    Raises:
        UserError: If it has none, or a damaged one.
    """
    if not (path / RUN).is_file() or is_universal(path):
        raise user_error("universal-input-missing", path=path)
    read_lock = lock_for_reading(path)
    damage = check_names(path) or files_damaged(find_damaged_files(path, read_manifest(path)))
    if damage is not None:
        raise user_error("checkpoint-damaged", path=path, damage=damage, hint="")
    return dataclasses.replace(read_run(path), read_lock=read_lock)


def total_bytes(states: StateReader) -> int:
    """Bytes of all tensors, padding of the vocabulary included."""
    return sum(
        4 * math.prod(shape) * (1 + len(states.state_names(name)))
        for name, shape in states.shapes.items()
    )


def write_states(
    folder: Path, states: StateReader, content: UniversalContent, on_tensor: OnTensor
) -> dict[str, FileRecord]:
    """Writes the states of all parameters, and DeepSpeed's own files.

    Returns:
        What was written, by path relative to the folder.
    """
    values: dict[str, Any] = {f"{ZERO}/{OPTIMIZER_STATE}": _optimizer_state(states, content)}
    state_file = {**content.run, "module": {}, "optimizer": None, INFO: _info(content)}
    values |= dict.fromkeys(STATE_FILES, state_file)
    (folder / ZERO).mkdir()
    records = {name: write_tensors(value, folder / name) for name, value in values.items()}
    for name, shape in states.shapes.items():
        if name in VOCABULARY_TABLES:
            shape = (content.rows, *shape[1:])
        declared = _declared(name, shape, content)
        (folder / ZERO / name).mkdir()
        for key in (MASTER, *states.state_names(name)):
            file = f"{ZERO}/{name}/{FP32 if key == MASTER else key}.pt"
            full = read_full(states, name, key, shape)
            records[file] = write_tensors({PARAM: full, **declared}, folder / file)
            on_tensor(name, full.nbytes)
            del full  # before the next one is read
        if (steps := states.steps(name)) is not None:
            file = f"{ZERO}/{name}/{STEP}.pt"
            records[file] = write_tensors(torch.tensor(float(steps)), folder / file)
    return records


def read_full(states: StateReader, name: str, key: str, shape: tuple[int, ...]) -> Tensor:
    """A full tensor, which is read in blocks of rows, so that it exists once."""
    tensor = states.tensor(name, key)
    step = max(1, BLOCK // math.prod(shape[1:]))
    if step >= shape[0]:
        return tensor.read(range(shape[0]))
    full = torch.empty(shape, dtype=tensor.dtype)
    for start in range(0, shape[0], step):
        rows = range(start, min(start + step, shape[0]))
        full[rows.start : rows.stop] = tensor.read(rows)
    return full


def _declared(name: str, shape: tuple[int, ...], content: UniversalContent) -> dict[str, Any]:
    """Sharding of a parameter in DeepSpeed's loader."""
    spec = content.specs.get(name)
    declared: dict[str, Any] = {}
    if name in VOCABULARY_TABLES:
        declared["vocab_tensor"] = True
    elif spec is not None:
        declared["cat_dim"] = spec.dim
        if len(spec.sections) > 1:
            sizes = (*shape[: spec.dim], spec.sections, *shape[spec.dim + 1 :])
            declared["sub_param_shape"] = SubparamShape([name], sizes, spec.dim)
    if name in content.experts:
        declared |= {"is_expert_param": True, "ep_num_experts": shape[0]}
    return declared


def _optimizer_state(states: StateReader, content: UniversalContent) -> dict[str, Any]:
    """Entries for the loaders of all stages: ZeRO 3's looks for them one level deeper."""
    common = dict(content.optimizer)
    steps = (states.steps(name) for name in states.shapes)
    step = next((value for value in steps if value is not None), None)
    state = {} if step is None else {0: {STEP: torch.tensor(float(step))}}
    inner = {"state": state, "param_groups": common["param_groups"]}
    return {"ds_version": deepspeed.__version__, **common, "optimizer_state_dict": inner}


def _info(content: UniversalContent) -> dict[str, Any]:
    tables = [f"^{name.replace('.', '[.]')}$" for name in VOCABULARY_TABLES]
    return {
        "universal_checkpoint_version": VERSION,
        "vocabulary_parameter_patterns": tables,
        "original_vocab_size": content.rows,
    }
