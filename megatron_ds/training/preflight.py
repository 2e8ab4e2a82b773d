"""What a run needs beside its flags, looked at before anything of it exists.

Owns the checks that take a look at the machine and at files: number formats, tokenizer, data and
the checkpoint to load; and the remarks on flags that do nothing beside others. It writes nothing,
knows no process group, and loads torch only for a tokenizer that needs it, when all else is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron_ds import schedule_validation, schedules
from megatron_ds.checkpoint.metadata import REPLACED, find_damage, resume_conflicts
from megatron_ds.checkpoint.selection import SelectionPolicy, list_folder, select_checkpoint
from megatron_ds.config import Config, field_problems
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data.validation import data_problems, data_warnings
from megatron_ds.launch import device
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.huggingface import needs_transformers


def check(config: Config, world_size: int, warn: Callable[[str], None]) -> list[str]:
    """Every reason why the run could not start or go on that its flags alone do not show.

    config: may hold contradictions; what depends on them is not judged. warn: called with one line
    per remark on settings that are sound and do nothing.
    """
    dp_size = config.parallel.data_parallel_size(world_size)
    sound = not config.problems(world_size) and not [*schedule_validation.problems(config, dp_size)]
    for line in [
        *config.warnings(),
        *(schedule_validation.warnings(config, dp_size) if sound else ()),
    ]:
        warn(line)
    problems = list(_precision_problems(config))
    tokenizer_problems, tokenizer = _tokenizer(config, sound)
    problems += tokenizer_problems
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    identity = None if tokenizer is None else tokenizer.fingerprint
    samples = schedules.planned_samples(config, dp_size) if sound else None
    problems += data_problems(config.data, samples, vocab_size, identity)
    if not problems:
        for line in data_warnings(config.data, None if tokenizer is None else tokenizer.eod):
            warn(line)
    if sound:
        problems += _checkpoint_problems(config, dp_size, vocab_size)
    return problems


def _precision_problems(config: Config) -> Iterator[str]:
    precision = config.precision
    if precision.fp16 and not precision.allow_fp16_on_cpu and device.known_without_fp16():
        yield device.fp16_error("this CPU")


def _tokenizer(config: Config, sound: bool) -> tuple[list[str], Tokenizer | None]:
    """What is wrong with the tokenizer, and the tokenizer if it could be built.

    A tokenizer whose library takes seconds to load is built only if all flags are right.
    """
    options, given = config.tokenizer, config.model.vocab_size or None
    if [*field_problems(options), *options.problems(given)]:
        return [], None  # Config.problems() tells
    slow = options.tokenizer_type == "HFTokenizer" and (
        options.trust_remote_code or needs_transformers(options.tokenizer_model or "")
    )
    if slow and not sound:
        return [], None
    try:
        tokenizer = build_tokenizer(options, given)
    except (ValueError, OSError) as error:
        return [str(error).replace("\n", " ")], None
    size = tokenizer.vocab_size
    if options.tokenizer_type != "NullTokenizer" and given not in (None, size):
        return [
            f"--vocab-size {given}: the tokenizer's vocabulary has {size} ids; leave the flag out"
        ], tokenizer
    return [], tokenizer


def _checkpoint_problems(config: Config, dp_size: int, vocab_size: int | None) -> Iterator[Problem]:
    """Why the checkpoint to load does not fit; its tensors are checked when it is loaded."""
    if config.checkpoint.load is None:
        return
    folder = Path(config.checkpoint.load)
    try:
        listing = list_folder(folder)
        if any(folder.glob(f"{REPLACED}*")):
            return  # an interrupted save, which the load repairs first
        policy = SelectionPolicy.of(config.checkpoint)
        found = select_checkpoint(listing, policy, find_damage, warn=lambda problem: None)
    except UserError as error:
        yield from error.problems
        return
    if found is not None:
        # Without a tokenizer, which is a problem of its own, the vocabulary is not compared.
        vocab: Any = found.run.config["model"].get("vocab_size")
        config = config.with_vocab(vocab if vocab_size is None else vocab_size)
        yield from resume_conflicts(found, config, dp_size)
