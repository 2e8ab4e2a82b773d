"""A checkpoint folder's own description.

Owns file names, `run.json` and the manifest. Reads no weights and imports no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.universal.folders import SUFFIX, is_universal
from megatron_ds.config import Config, DataConfig
from megatron_ds.config.problems import Problem, UserError, user_error
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.engine.deepspeed.partitions import FlatPartition
from megatron_ds.engine.ds_config.generate import partition_keys
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.fileio.file_lock import SharedLock
from megatron_ds.fileio.safe_names import is_safe_name
from megatron_ds.fileio.visibility import retry_stale
from megatron_ds.model.stages import layers_per_stage
from megatron_ds.tokenizer import TokenizerFingerprint
from megatron_ds.train_state import TrainState

MANIFEST = "manifest.json"
RUN = "run.json"
TOKENIZER = "tokenizer"
"""Folder with a copy of the tokenizer's files."""
POINTERS = ("latest", "latest_checkpointed_iteration.txt")
POINTER_PENDING = ".pointer-pending"
"""File in a checkpoint until the pointers name it, so that a crash in between does not hide it."""
REPLACED = ".replaced-"
"""Prefix of a checkpoint that is being replaced by another one of the same iteration."""
FORMAT_VERSION = 4
STATES = ".pt"
"""Suffix of the files that hold tensors."""
CHECKSUM_PLACEHOLDER = "0" * 64
WORLD_SIZES = (
    "tensor_model_parallel_size",
    "data_parallel_size",
    "ds_sequence_parallel_size",
    "pipeline_model_parallel_size",
)
"""Fields of a layout whose product is the number of processes."""
DamageCheck = Callable[[Path], Problem | None]
"""Returns the first problem of a checkpoint's folder; None for an undamaged one."""


@dataclass(frozen=True)
class ParallelLayout:
    """Distribution of a run over processes and of its optimizer's states over flat tensors."""

    tensor_model_parallel_size: int
    data_parallel_size: int
    zero_stage: int
    precision: str
    optimizer: str
    round_robin_gradients: bool
    parameter_alignment: bool
    sub_group_size: int
    """0 if the stage does not read it."""
    ds_sequence_parallel_size: int = 1
    """Ranks that have slices of the same sequences, however attention exchanges them."""
    expert_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    expert_tensor_parallel_size: str = ""
    """Empty if experts are sharded as dense layers."""
    layers_per_stage: str = ""
    """Transformer layers of each pipeline stage, separated by commas; empty without a pipeline."""

    @classmethod
    def of(cls, config: Config, dp_size: int) -> ParallelLayout:
        config = config.in_phase(0)  # all stages have the same
        return cls(
            tensor_model_parallel_size=config.parallel.tensor_model_parallel_size,
            data_parallel_size=dp_size,
            zero_stage=config.zero_stage,
            precision=config.precision.name,
            optimizer=config.optimizer.spec.checkpoint_name,
            ds_sequence_parallel_size=config.parallel.sequence_ranks,
            expert_model_parallel_size=config.expert_parallel_size,
            pipeline_model_parallel_size=config.parallel.pipeline_model_parallel_size,
            expert_tensor_parallel_size="1" if config.has_whole_experts else "",
            layers_per_stage=_layers_per_stage(config),
            **partition_keys(config, dp_size),
        )

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return math.prod(getattr(self, size) for size in WORLD_SIZES)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ParallelLayout:
        """Raises ValueError or TypeError for anything but the fields with values of their types."""
        layout = cls(**values)
        for item in dataclasses.fields(layout):
            if type(getattr(layout, item.name)).__name__ != item.type:
                raise ValueError(f"layout: {item.name} is not of type {item.type}")
        return layout


def _layers_per_stage(config: Config) -> str:
    if config.parallel.pipeline_model_parallel_size == 1:
        return ""
    return ",".join(map(str, layers_per_stage(config.model, config.parallel, config.moe)))


@dataclass(frozen=True)
class DataOrder:
    """The settings that determine, together with the data, which samples a step takes."""

    seed: int
    split: str | None
    global_batch_size: int
    """Samples per step after the ramp-up."""
    rampup_batch_size: list[int] | None
    step_batch_size_schedule: list[str] | None
    dataloader_type: str = "single"

    @classmethod
    def of(cls, config: Config, dp_size: int) -> DataOrder:
        rampup = config.schedule.rampup_batch_size
        steps = config.schedule.batch_size_steps
        split = config.data.split
        rounding = config.data.split_rounding
        if rounding != DataConfig.split_rounding:
            split = f"{split or 'the default'}, rounded as {rounding}"
        return cls(
            seed=config.runtime.seed,
            split=split,
            global_batch_size=config.final_global_batch_size(dp_size),
            rampup_batch_size=None if rampup is None else list(rampup),
            step_batch_size_schedule=[f"{tokens}:{size}" for tokens, size in steps] or None,
            dataloader_type=config.data.dataloader_type,
        )


@dataclass(frozen=True)
class ShardRecord:
    """Tensor-parallel sharding of a parameter, as `parallel.sharding.ShardSpec`."""

    dim: int
    sections: tuple[int, ...]
    parts: tuple[str, ...] = ()
    """Absent from checkpoints of older versions."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ShardRecord:
        """Raises ValueError, TypeError or KeyError for anything but the fields of a record."""
        sections = tuple(map(int, values["sections"]))
        parts = tuple(values.get("parts", ()))
        if parts and (len(parts) != len(sections) or not all(isinstance(p, str) for p in parts)):
            raise ValueError(f"shards: {parts} are not the names of {len(sections)} sections")
        return cls(int(values["dim"]), sections, parts)


@dataclass(frozen=True)
class RunRecord:
    """The contents of `run.json`."""

    state: TrainState
    config: Mapping[str, Mapping[str, Any]]
    """Settings of the run that saved the checkpoint, by group."""
    layout: ParallelLayout
    data_order: DataOrder
    shards: Mapping[str, ShardRecord]
    """Parameters that are sharded over the tensor-parallel ranks, by canonical name."""
    branch: Lineage
    """The checkpoints of the folder that it continues."""
    partitions: tuple[FlatPartition, ...] = ()
    """The optimizer's flat tensors on the first rank of each pipeline stage."""
    tokenizer: TokenizerFingerprint | None = None
    """The run's tokenizer, whose files are in `TOKENIZER`."""
    data: BlendHistory | None = None
    """Consumption of the training data."""
    experts: tuple[str, ...] = ()
    """Parameters whose dimension 0, of experts, is sharded over the expert-parallel ranks."""
    has_optimizer: bool = True
    """Whether the files have the states of the optimizer, and not only the weights."""
    custom_parts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of the functions that the run used instead of the package's own, by what they are."""
    published: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Description of the model that the run was initialized from, for exports; see
    `Publication`."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "format_version": FORMAT_VERSION,
            **asdict(self),
            "branch": self.branch.segments,
            "data": None if self.data is None else self.data.to_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> RunRecord:
        """Inverse of `to_dict`.

        Raises:
            ValueError: For anything that `to_dict` does not produce.
        """
        config = _objects(values, "config")
        if not {"model", "tokenizer"} <= config.keys():
            raise ValueError("config has no model or no tokenizer")
        try:
            return cls(
                state=TrainState.from_dict(_object(values, "state")),
                config=config,
                layout=ParallelLayout.from_dict(_object(values, "layout")),
                data_order=DataOrder(**_object(values, "data_order")),
                shards={
                    name: ShardRecord.from_dict(entry)
                    for name, entry in _objects(values, "shards").items()
                },
                branch=Lineage.from_json(values["branch"]),
                partitions=tuple(map(FlatPartition.from_dict, values["partitions"])),
                tokenizer=None
                if values["tokenizer"] is None
                else TokenizerFingerprint.from_dict(values["tokenizer"]),
                data=_history_of(values["data"], config),
                # The following are absent from checkpoints of older versions.
                experts=tuple(map(str, values.get("experts", ()))),
                has_optimizer=bool(values.get("has_optimizer", True)),
                custom_parts={
                    key: str(name) for key, name in values.get("custom_parts", {}).items()
                },
                published=_object({"published": {}, **values}, "published"),
            )
        except (TypeError, OverflowError, KeyError) as error:
            raise ValueError(f"unexpected or missing values ({error})") from error


def _history_of(values: Any, config: Mapping[str, Mapping[str, Any]]) -> BlendHistory | None:
    """The blend history, with the sequence length that older versions did not record in it."""
    if values is None:
        return None
    history = BlendHistory.from_dict(values)
    length = config["model"].get("seq_length", 0)
    if history.seq_length or not isinstance(length, int):
        return history
    return dataclasses.replace(history, seq_length=length)


def _object(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    if not isinstance(values.get(name), dict):
        raise ValueError(f"{name} is missing or not a JSON object")
    result: dict[str, Any] = values[name]
    return result


def _objects(values: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    return {key: _object(values[name], key) for key in _object(values, name)}


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and its `run.json`."""

    path: Path
    run: RunRecord
    read_lock: SharedLock | None = dataclasses.field(default=None, compare=False)
    """Keeps the checkpoint from being removed while it is read."""

    @property
    def iteration(self) -> int:
        return self.run.state.iteration

    @property
    def is_universal(self) -> bool:
        """Whether its states are full tensors, in the format of DeepSpeed's universal ones."""
        return is_universal(self.path)


def lock_for_reading(path: Path) -> SharedLock:
    """Keeps a checkpoint from being removed by the run that saves to its folder.

    To be called before it is checked: one that is just being removed turns out to be damaged.
    """
    return SharedLock(path / MANIFEST)


def iteration_of(path: Path) -> int:
    """The iteration in the name of a `global_stepN` folder."""
    return int(path.name.removeprefix("global_step"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders named global_stepN, newest first."""
    paths = [
        path
        for path in (folder.iterdir() if folder.is_dir() else ())
        if re.fullmatch(r"global_step\d+", path.name) and path.is_dir()
    ]
    return sorted(paths, key=lambda path: (iteration_of(path), path), reverse=True)


def read_pointers(folder: Path) -> dict[Path, str]:
    """The contents of the pointer files that exist."""
    paths = (folder / name for name in POINTERS)
    return {
        path: retry_stale(path.read_bytes).decode(errors="replace").strip()
        for path in paths
        if path.is_file()
    }


def check_names(path: Path) -> Problem | None:
    """Checks a checkpoint's file names, sizes and JSON files, without reading tensors.

    Returns:
        The first problem found; None for an undamaged checkpoint.
    """
    return find_record_damage(path) or _first_problem(path, _check_files)


def find_record_damage(path: Path) -> Problem | None:
    """Checks a checkpoint's run.json only, so that every rank of a large run can do it."""
    return _first_problem(path, read_run)


def _first_problem(path: Path, check: Callable[[Path], object]) -> Problem | None:
    try:
        retry_stale(lambda: check(path))
    except UserError as error:
        return error.problems[0]
    except FileNotFoundError as error:
        return Problem("checkpoint-save-unfinished", name=Path(str(error.filename)).name)
    except OSError as error:
        return unreadable_checkpoint(error)
    except ValueError as error:  # such as a name with a null byte
        return _metadata_damage(MANIFEST, error)
    return None


def listed_files(path: Path) -> Iterator[str]:
    """Names of the files of a manifest, each checked to be there with its size."""
    for name, (size, _) in read_manifest(path).items():
        file = path / name
        if not file.is_file():
            raise user_error("checkpoint-file-missing", name=name)
        if (actual := file.stat().st_size) != size:
            raise user_error("checkpoint-file-size", name=name, actual=actual, expected=size)
        yield name


def _check_files(path: Path) -> None:
    if is_universal(path) and not (path / MANIFEST).is_file():
        read_run(path)  # of DeepSpeed's converter
        return
    expected = {*listed_files(path)}
    unlisted = sorted({file.name for file in path.glob(f"*{STATES}")} - expected)
    if unlisted:
        raise user_error("checkpoint-file-unlisted", unlisted=unlisted[0], manifest=MANIFEST)


def unreadable_checkpoint(error: Exception) -> Problem:
    return Problem("checkpoint-unreadable", error=error)


def _metadata_damage(name: str, reason: object) -> Problem:
    return Problem("checkpoint-metadata-damaged", name=name, reason=reason)


def run_folder(path: Path) -> Path:
    """The folder with the `run.json` of a checkpoint, which may have none.

    That of a universal checkpoint may be the folder that it was converted from, by its name.
    """
    if not (path / RUN).is_file() and is_universal(path):
        return path.with_name(path.name.removesuffix(SUFFIX))
    return path


def _read_file(path: Path) -> bytes:
    """The content of a file; an error for a named pipe, whose reader would wait for a writer."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is no file")
    return retry_stale(path.read_bytes)


def read_run(path: Path) -> Checkpoint:
    """Reads a checkpoint's `run.json`.

    A universal checkpoint of DeepSpeed's converter has its source folder's.

    Raises:
        UserError: If it is damaged, of another format, or its iteration is not the folder's.
        OSError: If it cannot be read.
    """
    try:
        values = json.loads(_read_file(run_folder(path) / RUN))
        version = values["format_version"]
        run = RunRecord.from_dict(values) if version == FORMAT_VERSION else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(_metadata_damage(RUN, error)) from error
    if run is None:
        age = "an older" if version in range(FORMAT_VERSION) else "another"
        raise user_error("checkpoint-of-other-format", name=RUN, version=version, age=age)
    folder = run_folder(path)  # a universal checkpoint with its own may have any name
    is_named = is_universal(folder) or re.fullmatch(
        f"global_step0*{run.state.iteration}", folder.name
    )
    if not is_named:
        raise user_error("checkpoint-folder-name", name=RUN, iteration=run.state.iteration)
    return Checkpoint(path, run)


def manifest_text(files: Mapping[str, FileRecord]) -> str:
    """The text of the manifest of these files."""
    return checksum_manifest(
        {
            name: {"bytes": record.size, record.algorithm: record.checksum}
            for name, record in files.items()
        }
    )


def checksum_manifest(files: Mapping[str, Any]) -> str:
    """The text of a manifest with these entries, which contains its own SHA-256.

    The digest is computed with zeros instead of the digest, so a change of any byte is
    detected.
    """
    values = {
        "format_version": FORMAT_VERSION,
        "sha256": CHECKSUM_PLACEHOLDER,
        "files": dict(sorted(files.items())),
    }
    text = json.dumps(values, indent=1) + "\n"
    return text.replace(CHECKSUM_PLACEHOLDER, _digest(text), 1)


def read_manifest(path: Path) -> dict[str, FileRecord]:
    """The files of a checkpoint by name.

    Raises:
        UserError: If the manifest was changed after it was written, or names a file elsewhere.
        OSError: If it cannot be read.
    """
    content = _read_file(path / MANIFEST)
    try:
        values = json.loads(content)
        digest = str(values["sha256"])
        files = dict(values["files"])
        text = content.decode().replace(digest, CHECKSUM_PLACEHOLDER, 1)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(_metadata_damage(MANIFEST, repr(error))) from error
    if _digest(text) != digest:
        raise UserError(_metadata_damage(MANIFEST, "its contents do not match its SHA-256"))
    if unsafe := [name for name in files if not is_safe_name(name)]:
        reason = f"{unsafe[0]!r} is not the name of a file in its folder"
        raise UserError(_metadata_damage(MANIFEST, reason))
    try:
        return {name: _file_record(entry) for name, entry in files.items()}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise UserError(_metadata_damage(MANIFEST, repr(error))) from error


def _file_record(entry: Mapping[str, Any]) -> FileRecord:
    """An entry of the manifest; entries of older versions have SHA-256."""
    checksum = entry["xxh3_128"] if "xxh3_128" in entry else entry["sha256"]
    return FileRecord(int(entry["bytes"]), str(checksum))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
