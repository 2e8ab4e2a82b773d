"""What a checkpoint's folder says of itself, and whether it fits a run.

Owns names, sizes, run.json and the manifest; reads no weights and knows no torch, so that a
checkpoint that does not fit is named before a run starts.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from megatron_ds.config import GROUPS, SPLIT_DATA_FIELDS, Config, ModelConfig, flag_of
from megatron_ds.data.blend_history import BlendHistory
from megatron_ds.engine.ds_config import zero_stage
from megatron_ds.train_state import TrainState

MANIFEST = "manifest.json"
RUN = "run.json"
POINTERS = ("latest", "latest_checkpointed_iteration.txt")
REPLACED = ".replaced-"
"""Prefix of a checkpoint that made way for one of the same iteration."""
FORMAT_VERSION = 2
RESUMABLE_FIELDS = frozenset({"attention_dropout", "hidden_dropout", "init_method_std"})
"""Fields of the model that may change on a resume."""
VOCABULARY = ("vocab_size", "make_vocab_size_divisible_by")
"""Fields of the model that make the rows of its embedding table."""
FIELDS = frozenset(item.name for group in GROUPS.values() for item in fields(group))
STATES = ".pt"
"""Ending of the files that hold tensors."""
CHECKSUM_PLACEHOLDER = "0" * 64


@dataclass(frozen=True)
class CheckpointMetadata:
    """A complete checkpoint."""

    path: Path
    iteration: int
    run: dict[str, Any]

    @property
    def state(self) -> TrainState:
        return TrainState.from_dict(self.run["state"])

    @property
    def history(self) -> BlendHistory | None:
        """Of the training data; None if it is not known. Raises ValueError if it is damaged."""
        if not self.run.get("data"):
            return None
        try:
            return BlendHistory.from_dict(self.run["data"])
        except ValueError as error:
            raise ValueError(f"data: {error}") from error


def parallel_layout(config: Config, dp_size: int) -> dict[str, Any]:
    """How the run is cut over processes, which a resume must repeat."""
    return {
        "tensor_model_parallel_size": config.parallel.tensor_model_parallel_size,
        "data_parallel_size": dp_size,
        "zero_stage": zero_stage(config),
        "precision": config.precision.name,
        "optimizer": config.optimizer.optimizer,
    }


def data_order_settings(config: Config, dp_size: int) -> dict[str, Any]:
    """What decides, beside the data itself, which samples a step takes."""
    rampup = config.schedule.rampup_batch_size
    return {
        "seed": config.runtime.seed,
        "split": config.data.split,
        "global_batch_size": config.final_global_batch_size(dp_size),
        "rampup_batch_size": None if rampup is None else list(rampup),
        "step_batch_size_schedule": [
            f"{tokens}:{size}" for tokens, size in config.schedule.batch_size_steps
        ]
        or None,
    }


def resume_conflicts(found: CheckpointMetadata, config: Config, dp_size: int) -> list[str]:
    """Why a run cannot continue from a checkpoint."""
    problems = []
    before = found.run["config"]
    for key, now in config.to_dict()["model"].items():
        saved = before["model"].get(key)
        if saved != now and key not in RESUMABLE_FIELDS.union(VOCABULARY):
            problems.append(f"{_named(key)} is {saved} in the checkpoint and {now} in this run")
    there, here = (
        _padding(model, config.parallel.tensor_model_parallel_size)
        for model in (before["model"], config.to_dict()["model"])
    )
    if there != here:
        problems.append(
            f"the vocabulary, padded by --make-vocab-size-divisible-by, is {there} in the "
            f"checkpoint and {here} in this run"
        )
    for key, now in parallel_layout(config, dp_size).items():
        saved = found.run["layout"].get(key)
        if saved != now:
            problems.append(
                f"{_named(key)} is {saved} in the checkpoint and {now} in this run "
                "(a resume needs the same layout)"
            )
    cut = before.get("data", {}), config.to_dict()["data"]
    for key, now in data_order_settings(config, dp_size).items():
        saved = found.run["order"].get(key)
        # Where --split does not cut the data of both runs, the documents' numbers are compared.
        if key == "split" and not all(
            any(data.get(each) for each in SPLIT_DATA_FIELDS) for data in cut
        ):
            continue
        if saved != now:
            problems.append(
                f"{_named(key)} is {saved} in the checkpoint and {now} in this run "
                "(it decides which samples come next)"
            )
    return problems


def _padding(model: dict[str, Any], tp_size: int) -> str:
    """The rows of the embedding table, with their origin."""
    vocab, unit = (model.get(name) for name in VOCABULARY)
    words = f"{vocab} tokens in units of {unit}"
    if not (isinstance(vocab, int) and isinstance(unit, int) and unit > 0):
        return words
    padded = ModelConfig(vocab_size=vocab, make_vocab_size_divisible_by=unit).padded_vocab(tp_size)
    return f"{words} = {padded} rows"


def _named(key: str) -> str:
    """The flag of a field, unless that says the opposite of the field; the plain name of others."""
    spelled = f"--{key.replace('_', '-')}"
    return spelled if key in FIELDS and flag_of(key) == spelled else key


def list_checkpoints(folder: Path) -> list[Path]:
    """The folders named global_stepN, newest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        match = re.fullmatch(r"global_step(\d+)", path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return [path for _, path in sorted(found, reverse=True)]


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's names, sizes and JSON files; None if nothing is."""
    try:
        expected = {name: int(entry["bytes"]) for name, entry in read_manifest(path).items()}
        read_run(path)
        for name, size in expected.items():
            file = path / name
            if not file.is_file():
                return f"{name} is missing"
            if file.stat().st_size != size:
                return f"{name} has {file.stat().st_size} bytes, the manifest says {size}"
        unknown = sorted({file.name for file in path.glob(f"*{STATES}")} - expected.keys())
    except FileNotFoundError as error:
        return f"it has no {Path(str(error.filename)).name}, so its save did not finish"
    except OSError as error:
        return f"it cannot be read ({error})"
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        return f"its {MANIFEST} or {RUN} cannot be read ({error})"
    if unknown:
        return f"{unknown[0]} is not one of its files (the manifest does not name it)"
    return None


def stale_pointers(folder: Path, newest: Path | None) -> list[str]:
    """What the pointers say other than the newest folder's name: one line for each."""
    expected = ("", "") if newest is None else (newest.name, newest.name[len("global_step") :])
    found = []
    for name, right in zip(POINTERS, expected, strict=True):
        path = folder / name
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace").strip()
            if text != right:
                found.append(f"{path} says {text[:80]!r}")
    return found


def read_run(path: Path) -> CheckpointMetadata:
    """What a checkpoint says of itself. Raises ValueError if that is not ours."""
    run = read_json(path / RUN)
    if not isinstance(run, dict):
        raise ValueError(f"{path / RUN}: not a JSON object")
    if run.get("format_version") != FORMAT_VERSION:
        raise ValueError(
            f"{path / RUN}: format version {run.get('format_version')}, expected {FORMAT_VERSION}"
        )
    for name in ("state", "config", "layout", "order", "shards"):
        if not isinstance(run.get(name), dict):
            raise ValueError(f"{path / RUN}: {name} is missing or not a JSON object")
    if not isinstance(run["config"].get("model"), dict):
        raise ValueError(f"{path / RUN}: config.model is missing or not a JSON object")
    found = CheckpointMetadata(path, int(path.name.removeprefix("global_step")), run)
    try:
        iteration = found.state.iteration
        _ = found.history
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{path / RUN}: the state is not made of numbers ({error})") from error
    if iteration != found.iteration:
        raise ValueError(f"{path / RUN}: the state is of iteration {iteration}")
    return found


def checksum_manifest(files: dict[str, Any]) -> str:
    """The text of a manifest that lists `files`; it carries its own SHA-256.

    The digest is that of the text with zeros in the digest's place, so that no byte of it can
    change unseen.
    """
    values = {
        "format_version": FORMAT_VERSION,
        "sha256": CHECKSUM_PLACEHOLDER,
        "files": dict(sorted(files.items())),
    }
    text = json.dumps(values, indent=1) + "\n"
    return text.replace(CHECKSUM_PLACEHOLDER, _digest(text), 1)


def read_manifest(path: Path) -> dict[str, Any]:
    """Files of a checkpoint -> bytes and sha256. Raises ValueError for one that was changed."""
    content = (path / MANIFEST).read_bytes()
    try:
        values = json.loads(content)
        seal_of_file, files = str(values["sha256"]), values["files"]
        unsealed = content.decode().replace(seal_of_file, CHECKSUM_PLACEHOLDER, 1)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{MANIFEST} is damaged ({error!r})") from error
    if _digest(unsealed) != seal_of_file or not isinstance(files, dict):
        raise ValueError(f"{MANIFEST} is damaged (its SHA-256 differs from the one in it)")
    return files


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Raises ValueError for what is no JSON."""
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error})") from error
