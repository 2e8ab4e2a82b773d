"""Checks the machine and the files that a run needs before anything of the run is built.

Owns the checks of number formats, tokenizer, data and the checkpoint to load, and opens tokenizer
and data files for the run. Writes nothing and knows no process group. Imports torch only for a
tokenizer that needs it, once all settings are right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds import schedule_validation, schedules
from megatron_ds.checkpoint.compatibility import resume_conflicts, tokenizer_conflicts
from megatron_ds.config import Config, DataConfig, EvaluationConfig
from megatron_ds.config.checks import folder_problems
from megatron_ds.config.fields import field_problems
from megatron_ds.config.phases import by_phase
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.data import validation
from megatron_ds.data.exclusion import excluded_sequences
from megatron_ds.data.fill_in_middle import fim_problems
from megatron_ds.data.validation import DataFiles
from megatron_ds.engine.ds_config.generate import bucket_warnings
from megatron_ds.launch import device, environment
from megatron_ds.loading import continued_steps, initial_load
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.planning import swap_disk
from megatron_ds.planning.swap_disk import Disk
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.huggingface import needs_transformers
from megatron_ds.training.start.data_length import open_data


@dataclass(frozen=True)
class RunInputs:
    """Inputs that the checks have opened for the run, and the plan of what it loads."""

    plan: LoadPlan
    tokenizer: Tokenizer
    data: tuple[DataFiles, ...]
    """Data files of each phase."""


def check(
    config: Config, plan: LoadPlan, world_size: int, is_sound: bool, warn: Callable[[Problem], None]
) -> tuple[list[Problem], RunInputs | None]:
    """Checks what the settings need of machine and files.

    Args:
        config: Configuration. What depends on contradictory settings is not checked.
        plan: Plan of what the run loads.
        world_size: Number of processes.
        is_sound: Whether the settings have no problems.
        warn: Called with each warning.

    Returns:
        Every problem, and the opened inputs; None if the tokenizer could not be built.
    """
    dp_size = config.parallel.data_parallel_size(world_size)
    warnings = schedule_validation.warnings(config, dp_size) if is_sound else ()
    for warning in (*config.warnings(), *warnings):
        warn(warning)
    if tasks := environment.unused_tasks():
        warn(Problem("slurm-tasks-unused", tasks=tasks))
    problems = []
    precision = config.precision
    if precision.fp16 and not precision.allow_fp16_on_cpu and device.known_without_fp16():
        problems.append(Problem("fp16-not-supported", device="this CPU"))
    tokenizer, tokenizer_problems = check_tokenizer(config, is_sound)
    problems += tokenizer_problems
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    size = config.model.vocab_size or vocab_size
    if is_sound and size and dp_size > 1:
        for warning in bucket_warnings(config.with_vocab(size)):
            warn(warning)
    data, data_errors = check_data(config, plan, dp_size if is_sound else None, tokenizer, warn)
    problems += data_errors
    if is_sound:
        problems += _checkpoint_problems(config, plan, dp_size, tokenizer)
        if plan.imported is not None and not problems:
            for note in continued_steps.step_notes(plan.imported, config, dp_size):
                warn(note)
        problems += _task_problems(config.evaluation)
    if (local := config.checkpoint.local_checkpoint_dir) is not None:
        folder = environment.expand_variables(local)
        problems += folder_problems("local_checkpoint_dir", folder)
    disk, disk_problems = _check_disk(config)
    is_merged = config.deepspeed_file is not None or config.deepspeed.deepspeed_config is None
    if is_sound and is_merged and not problems:
        from megatron_ds.planning import host_checks

        complete = config.with_vocab(vocab_size or size or 0)
        processes = environment.local_world_size() or 1
        host = host_checks.Host.here(processes, disk)
        warned = dict[Problem, None]()
        problems += by_phase(
            complete, lambda phase: host_checks.problems(phase, dp_size, host, warned.setdefault)
        )
        for warning in warned:
            warn(warning)
    problems += disk_problems
    return problems, None if tokenizer is None else RunInputs(plan, tokenizer, data)


def check_data(
    config: Config,
    plan: LoadPlan,
    dp_size: int | None,
    tokenizer: Tokenizer | None,
    warn: Callable[[Problem], None],
) -> tuple[tuple[DataFiles, ...], list[Problem]]:
    """The data of each phase, and its problems unless the checkpoint's run has read it.

    Args:
        config: Configuration.
        plan: Plan of what the run loads.
        dp_size: Data-parallel size; None if the settings have problems.
        tokenizer: None if it could not be built.
        warn: Called with each warning.
    """
    vocab_size = None
    fingerprint = None
    eod = None
    bos = None
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size
        fingerprint = tokenizer.fingerprint
        eod = tokenizer.eod
        bos = tokenizer.bos if tokenizer.adds_bos else None
    saved = None if config.checkpoint.is_new_run else plan.saved
    first = 0 if saved is None else saved.run.state.stage
    data = list[DataFiles]()

    def check_phase(phase: Config) -> Iterator[Problem]:
        options = phase.data if phase.evaluation.eval_only is None else DataConfig()
        files = DataFiles(options, data[0].cache) if data else open_data(options)
        data.append(files)
        if len(data) <= first < len(config.phase_configs):
            return
        samples = None if dp_size is None else schedules.planned_samples(phase, dp_size)
        problems = list(validation.data_problems(files, samples, vocab_size, fingerprint))
        yield from problems
        if not problems:
            yield from validation.loss_span_problems(files)
            is_per_token = phase.optimizer.calculate_per_token_loss
            for warning in validation.loss_span_warnings(files, is_per_token=is_per_token):
                warn(warning)
        if tokenizer is not None:
            yield from validation.boundary_problems(options, eod)
            yield from fim_problems(options, tokenizer)
        if tokenizer is not None and not problems:
            needed = samples or (0, 0, 0)
            length = phase.model.seq_length
            for warning in validation.data_warnings(files, needed, eod, bos, length):
                warn(warning)

    problems = by_phase(config, check_phase)
    if config.data.exclude_documents and not problems:
        problems += excluded_sequences(data)[1]
    return tuple(data), problems


def _task_problems(options: EvaluationConfig) -> Iterator[Problem]:
    """Yields reasons that tasks cannot be evaluated; their modules import torch."""
    if options.file_tasks or options.harness_tasks:
        from megatron_ds.evaluation import in_training

        yield from in_training.problems(options)


def _check_disk(config: Config) -> tuple[Disk | None, list[Problem]]:
    """The disk for what is offloaded to NVMe, on the first process of a host."""
    path = config.deepspeed.nvme_path
    if not (config.deepspeed.uses_nvme and path and environment.local_rank() == 0):
        return None, []
    return swap_disk.check(Path(path))


def check_tokenizer(config: Config, is_sound: bool) -> tuple[Tokenizer | None, list[Problem]]:
    """The tokenizer, if it can be built, and its problems."""
    try:
        tokenizer = _build_tokenizer(config, is_sound)
    except UserError as error:
        return None, [*error.problems]
    except OSError as error:
        return None, [Problem("tokenizer-unreadable", error=error)]
    size = config.model.vocab_size
    vocab_size = None if tokenizer is None else tokenizer.vocab_size
    is_null = config.tokenizer.tokenizer_type == "NullTokenizer"  # it adds an end-of-document id
    if not size or vocab_size in (None, size) or is_null:
        model = config.with_vocab(vocab_size or 0).model
        tp_size = config.axis_sizes["tp_size"]
        return tokenizer, [*model.padding_problems(tp_size)] if is_sound else []
    problem = Problem("vocab-size-differs-from-tokenizer", given=size, vocab_size=vocab_size)
    return tokenizer, [problem]


def _build_tokenizer(config: Config, is_sound: bool) -> Tokenizer | None:
    """Builds the tokenizer; None if its settings have problems or it is not worth the time.

    Raises:
        UserError: If its files are missing or damaged.
    """
    options = config.tokenizer
    size = config.model.vocab_size or None
    if [*field_problems(options), *options.problems(size)]:
        return None  # reported by Config.problems()
    # transformers takes seconds to import, too long for a run that cannot start anyway.
    is_slow = options.tokenizer_type == "HFTokenizer" and (
        options.trust_remote_code or needs_transformers(options.tokenizer_model or "")
    )
    return None if is_slow and not is_sound else build_tokenizer(options, size)


def _checkpoint_problems(
    config: Config, plan: LoadPlan, dp_size: int, tokenizer: Tokenizer | None
) -> Iterator[Problem]:
    """Yields reasons against the checkpoint to load; its tensors are checked when it is loaded."""
    if plan.imported is not None:
        if tokenizer is not None:
            yield from initial_load.conflicts(plan.imported, config, tokenizer.vocab_size)
        yield from continued_steps.step_conflicts(plan.imported, config, dp_size)
        if environment.local_rank() == 0:
            yield from initial_load.check_import(plan.imported)
    yield from plan.unusable
    if plan.saved is not None:
        # Without a tokenizer, which is a problem of its own, the vocabulary is not compared.
        vocab: Any = plan.saved.run.config["model"].get("vocab_size")
        config = config.with_vocab(vocab if tokenizer is None else tokenizer.vocab_size)
        yield from resume_conflicts(plan.saved, config, dp_size)
        if tokenizer is not None:
            yield from tokenizer_conflicts(plan.saved, tokenizer.fingerprint)
