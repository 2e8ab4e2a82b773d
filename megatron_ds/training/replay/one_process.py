"""Settings and start of one process on the host that computes the steps of a run again.

Owns which settings such a process takes from a run, and where it may read and write. Imports no
torch.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.config import GROUP_OF_FIELD, Config, fields_that_only_decide
from megatron_ds.config.fields import Decides
from megatron_ds.config.options.checkpoint import split_location
from megatron_ds.engine.ds_config.fields import field_value
from megatron_ds.launch.ranks.rank_variables import RANK_VARIABLES
from megatron_ds.programs import start_words
from megatron_ds.training.replay.recorded_run import restricted

Replay = Callable[[Sequence[str]], int]
"""Trains as one process on the host, with flags of pretrain_gpt.py; returns the exit status."""
LAUNCHER = (*RANK_VARIABLES, "MASTER_ADDR", "MASTER_PORT")
DROPPED = Decides.LAYOUT | Decides.OPERATION | Decides.RUN
"""Kinds of settings that a replay does not take from the run."""


@dataclass(frozen=True)
class Trust:
    """Permissions that the caller gives for using a run's record.

    Attributes:
        changes: Settings that replace recorded ones, by field.
        files: Whether files outside of the run's folder are read where the record names them.
    """

    changes: Mapping[str, Any] = field(default_factory=dict)
    files: bool = False


def trust_of(options: Any) -> Trust:
    """What the options of a program that replays steps permit.

    Args:
        options: A dataclass with `training`, the settings of flags of pretrain_gpt.py, `given`, the
            names of all given options, and `trust_recorded_files`.
    """
    of_tool = {item.name for item in dataclasses.fields(options)}
    changes = {name: field_value(options.training, name) for name in options.given - of_tool}
    return Trust(changes, options.trust_recorded_files)


def one_process(
    before: Config, values: Mapping[str, Any], run: Path, folder: Path, trust: Trust
) -> Config:
    """The settings of a run, for one process that saves nothing.

    Args:
        before: Settings of the run.
        values: Settings that this process has besides, by field.
        run: Folder of the run, whose files are always read.
        folder: Temporary folder, which receives all files that are written.
        trust: Settings of the caller, and what the record may name.

    Raises:
        UserError: If the settings name what is not trusted.
    """
    default = Config()
    model = before.model
    unit = math.lcm(model.make_vocab_size_divisible_by, before.parallel.tensor_model_parallel_size)
    is_null = before.tokenizer.tokenizer_type == "NullTokenizer"
    has_bf16_masters = before.in_effect("bf16_master_weights")
    replaced: dict[str, Any] = {
        "eval_iters": 0,
        "num_workers": 0,
        "memory_check": "off",
        "max_consecutive_skipped_steps": 0,
        "make_vocab_size_divisible_by": unit,
        "vocab_size": model.vocab_size - is_null,  # which counts no end of documents
        "metrics_jsonl": str(folder / "metrics.jsonl"),
        "seed": before.runtime.seed,
        "zero_stage": 2 if has_bf16_masters else min(before.zero_stage, 1),
        "allow_fp16_on_cpu": before.precision.fp16,
        **values,
        **trust.changes,
    }
    dropped = fields_that_only_decide(DROPPED)
    dropped -= vars(before.data).keys()  # where token files are cached is `restricted` below
    unlike = {name: field_value(default, name) for name in dropped}
    config = before.with_values({**unlike, **replaced})
    is_run = split_location(values.get("load") or "")[1] == str(run)
    known = {*trust.changes, *(("load",) if is_run else ())}
    config = restricted(config, run, folder, replaced=known, is_trusted=trust.files)
    names = {x for x in GROUP_OF_FIELD if field_value(config, x) != field_value(default, x)}
    names -= set() if is_null else {"vocab_size"}
    return dataclasses.replace(config, given=frozenset(names | trust.changes.keys()))


def start_replay(program: Sequence[str], show_logs: bool, words: Sequence[str]) -> int:
    """Trains as one process on the host; prints its log if it fails, or if asked for.

    Args:
        program: Words of Python's command line up to the flags; empty: pretrain_gpt.py.
        show_logs: Print the log even so.
        words: Flags of the program.
    """
    program = program or start_words("train")
    unset = [word for name in LAUNCHER for word in ("-u", name)]
    command = ["env", *unset, "DS_ACCELERATOR=cpu", sys.executable, *program, *words]
    if show_logs:
        return subprocess.call(command, stdout=sys.stderr)
    with tempfile.TemporaryFile() as log:
        status = subprocess.call(command, stdout=log, stderr=log)
        if status:
            log.seek(0)
            shutil.copyfileobj(log, sys.stderr.buffer)
    return status
