"""Interprets --load for a run, once: the location, the checkpoint, the source of options.

Owns the choice between --load and --pretrained-checkpoint, and between checkpoints of this program
and of others. Imports no torch unless another program's checkpoint is loaded.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ds.checkpoint.location import Location, RunFolders
from megatron_ds.checkpoint.metadata import (
    REPLACED,
    Checkpoint,
    DamageCheck,
    check_names,
    find_record_damage,
)
from megatron_ds.checkpoint.selection import CheckpointListing, list_folder, select_checkpoint
from megatron_ds.config import MODEL_SIZE_FIELDS, CheckpointConfig, Config
from megatron_ds.config.options.checkpoint import (
    FORMATS,
    TAG,
    TRAINERS,
    hub_model,
    is_remote,
    is_same_path,
    is_url,
    missing_folder,
    split_location,
)
from megatron_ds.config.problems import (
    Problem,
    UserError,
    collect,
    ignore,
    raise_if_any,
    renaming_fields,
)
from megatron_ds.conversion.foreign.recognition import DEPTH, find_foreign, find_foreign_in
from megatron_ds.conversion.foreign.trainers import detect_trainer
from megatron_ds.conversion.megatron.detect import MegatronCheckpoint, detect_megatron
from megatron_ds.conversion.model_settings import malformed_values
from megatron_ds.conversion.weights_locations import HF, HF_CONFIG, is_hf
from megatron_ds.loading.continued_steps import take_over, with_samples
from megatron_ds.loading.initial_load import find_importable, merge_model, open_importable
from megatron_ds.loading.locations import download_config, locate_save, locate_weights
from megatron_ds.loading.options_from_checkpoint import (
    Warn,
    with_saved_options,
    with_saved_schedule,
)

if TYPE_CHECKING:
    from megatron_ds.conversion.source import SourceCheckpoint


@dataclass(frozen=True)
class LoadPlan:
    """Plan of what a run loads."""

    folders: RunFolders
    imported: SourceCheckpoint | None = None
    """A checkpoint of another program, or weights alone."""
    saved: Checkpoint | None = None
    """Otherwise the checkpoint of this program. `Restoring.select` selects again."""
    unusable: tuple[Problem, ...] = ()
    """Reason that no checkpoint of this program can be selected."""


@dataclass(frozen=True)
class _Contents:
    """The contents of a folder to load from."""

    listing: CheckpointListing | None
    """Checkpoints of this program; None if the folder cannot be read."""
    unreadable: tuple[Problem, ...]
    megatron: MegatronCheckpoint | None
    """Checkpoint of one of Megatron's programs."""
    importable: Path | None
    is_interrupted: bool
    """Whether a save was interrupted, which the load repairs first."""
    has_checkpoint: bool
    """Whether a run would load something from here, or fail to."""


def make_plan(
    config: Config, world_size: int = 1, warn: Warn = ignore
) -> tuple[Config, LoadPlan, list[Problem]]:
    """Decides what a run loads, and takes the options of model and tokenizer from there.

    Local: every process calls it before the process group exists.

    Args:
        config: Configuration of the command line.
        world_size: Number of processes.
        warn: Called for each given option that --use-checkpoint-args replaces.

    Returns:
        The configuration, what it loads, and every option that contradicts the checkpoint of
        another program.
    """
    options = config.checkpoint
    problems = list[Problem]()
    save = None
    load = None
    contents = None
    with collect(problems):
        save = locate_save(options)
    if problems and options.load == options.save:  # its store is not asked a second time
        return config, LoadPlan(RunFolders(None, None)), problems
    with collect(problems):
        load = locate_weights("load", options, save)
        contents = _look_into(load, options)
        has_load = split_location(options.load or "")[0] != "auto" or contents.has_checkpoint
        if options.pretrained_checkpoint is not None and not has_load:
            options = _with_pretrained(options)
            load = None
            contents = None
            load = locate_weights("pretrained_checkpoint", options)
            contents = _look_into(load, options)
    config = dataclasses.replace(config, checkpoint=options)
    plan = LoadPlan(RunFolders(save, load))
    if load is None or contents is None:
        return config, plan, problems
    if (foreign := _foreign_weights(options, load, contents)) is not None:
        return config, plan, [*problems, foreign]
    problems += _missing_weights(config, load, contents)
    if contents.importable is not None:
        config, imported, differing = open_importable(contents.importable, config, warn)
        if imported is not None and not differing:
            config = take_over(config, imported, warn)
        return config, dataclasses.replace(plan, imported=imported), [*problems, *differing]
    # Every rank of a large run cannot check every file; the first one does it for all, later.
    # For a URL, only run.json is local; the files are in the store.
    check = check_names if world_size == 1 and load.url is None else find_record_damage
    saved, unusable = _select(contents, options, check)
    described = saved
    if unusable:  # a checkpoint with damaged files still has the options of its run
        described, _ = _select(contents, options, find_record_damage)
    if described is not None:
        config = with_saved_options(config, described, warn)
    if contents.is_interrupted:
        unusable = ()
    return config, LoadPlan(plan.folders, None, saved, unusable), problems


def continue_schedule(
    config: Config, plan: LoadPlan, world_size: int, warn: Warn
) -> tuple[Config, LoadPlan, list[Problem]]:
    """Fills in the consumed samples and, on request, the schedule that the run continues.

    Args:
        config: Configuration with the batch sizes of the DeepSpeed file.
        plan: Plan of what the run loads.
        world_size: Number of processes.
        warn: Called for each given option that is replaced.

    Returns:
        The configuration, the plan, and why it cannot have the schedule of the checkpoint.
    """
    if plan.imported is not None:
        imported = with_samples(plan.imported, config, world_size)
        plan = dataclasses.replace(plan, imported=imported)
    training = None if plan.imported is None else plan.imported.training
    run = training if plan.saved is None else plan.saved.run.state
    if run is not None and run.consumed_samples and not config.checkpoint.is_new_run:
        config = dataclasses.replace(config, start_samples=run.consumed_samples)
    flag = "use_checkpoint_opt_param_scheduler"
    if not config.checkpoint.use_checkpoint_opt_param_scheduler:
        return config, plan, []
    if plan.imported is not None:
        problem = Problem("checkpoint-without-schedule", flag, path=plan.folders.load)
        return config, plan, [problem]
    if plan.saved is not None:
        config, problems = with_saved_schedule(config, plan.saved, world_size, warn)
        return config, plan, problems
    return config, plan, []


def model_options(config: Config, warn: Warn) -> tuple[Config, list[Problem]]:
    """Takes the options of the model from a folder of Hugging Face; config.json is enough.

    For a plan: parts of the model that ours lacks are left out.

    Args:
        config: Configuration of the command line.
        warn: Called for each option that is replaced, and for parts that are left out.
    """
    problems = list[Problem]()
    for field in ("load", "pretrained_checkpoint"):
        location = getattr(config.checkpoint, field) or ""
        name, folder = split_location(location)
        # config.json is enough, and the weights may be others.
        has_config = not location or is_remote(location) or is_hf(Path(folder))
        foreign = None if has_config else find_foreign(Path(folder), location, name=name)
        if foreign is not None:
            return config, [foreign.about(load=field)]
        if name == HF or (location and is_hf(Path(folder))):
            with collect(problems), renaming_fields(load=field):
                raise_if_any(missing_folder(location))
                model = hub_model(location)
                path = Path(folder) if model is None else download_config(field, model)
                return _with_hf_model(config, path, warn)
    return config, problems


def _with_hf_model(config: Config, path: Path, warn: Warn) -> tuple[Config, list[Problem]]:
    from megatron_ds.conversion.huggingface.read_config import read_settings

    lacking: list[str] = []
    with malformed_values(path / HF_CONFIG):
        settings = read_settings(path, lacking).settings
    if lacking:
        warn(Problem("plan-leaves-out", path=path / HF_CONFIG, parts="; ".join(lacking)))
    config, problems = merge_model(config, settings, path, warn)
    if config.given.isdisjoint({"vocab_size", *vars(config.tokenizer)}):
        config = config.with_vocab(settings.model.vocab_size)
        config = dataclasses.replace(config, given=config.given | {"vocab_size"})
    return config, problems


def _look_into(location: Location | None, options: CheckpointConfig) -> _Contents:
    if location is None:
        return _Contents(None, (), None, None, is_interrupted=False, has_checkpoint=False)
    folder = location.folder
    megatron = detect_megatron(folder)
    importable = find_importable(folder, options, megatron)
    try:
        listing = list_folder(folder)
    except UserError as error:
        return _Contents(None, error.problems, megatron, importable, False, has_checkpoint=True)
    is_interrupted = any(folder.glob(f"{REPLACED}*"))
    is_own = listing.paths or listing.universal or listing.stale or is_interrupted
    has_checkpoint = bool(is_own or importable or megatron)
    return _Contents(listing, (), megatron, importable, is_interrupted, has_checkpoint)


def _with_pretrained(options: CheckpointConfig) -> CheckpointConfig:
    """The options of a run that starts with the weights of --pretrained-checkpoint."""
    return dataclasses.replace(
        options,
        load=options.pretrained_checkpoint,
        finetune=True,
        reset_iteration=False,
        exit_on_missing_checkpoint=True,
    )


def _foreign_weights(
    options: CheckpointConfig, location: Location, contents: _Contents
) -> Problem | None:
    """The message on a location of another program's checkpoint that is not read."""
    load = options.load or ""
    save = options.save
    # A new run may have anything below its --save folder.
    is_saved = save is not None and not is_url(save) and is_same_path(save, load)
    name = split_location(load)[0]
    depth = 0 if is_saved else DEPTH
    folder = location.folder
    if folder.is_file():
        problem = find_foreign(folder, location)
    else:
        problem = find_foreign_in(folder, contents.megatron, location, name=name, depth=depth)
    if problem is None or load != options.pretrained_checkpoint:
        return problem
    return problem.about(load="pretrained_checkpoint")


def _missing_weights(config: Config, location: Location, contents: _Contents) -> list[Problem]:
    """Returns the reasons that the location lacks the weights that the run expects there."""
    options = config.checkpoint
    assert options.load is not None
    name = split_location(options.load)[0]
    is_expected = name != "auto" or options.is_new_run or config.given.isdisjoint(MODEL_SIZE_FIELDS)
    is_there = is_hf(location.folder) if name == HF else contents.has_checkpoint
    if name in TRAINERS:
        is_there = detect_trainer(location.folder, name) is not None
    is_one = TAG.fullmatch(location.folder.name)  # an error of its own
    if not is_expected or is_there or is_one:
        return []
    known = ", ".join(FORMATS) if name == "auto" else name
    unknown = Problem("weights-format-unknown", path=location, known=known)
    problems = [*missing_folder(options.load)] or [unknown]
    if options.load == options.pretrained_checkpoint:
        return [problem.about(load="pretrained_checkpoint") for problem in problems]
    return problems


def _select(
    contents: _Contents, options: CheckpointConfig, check: DamageCheck
) -> tuple[Checkpoint | None, tuple[Problem, ...]]:
    """The checkpoint of this program to load, or why it cannot be selected."""
    if contents.listing is None:
        return None, contents.unreadable
    try:
        saved = select_checkpoint(contents.listing, options, check, warn=ignore)
    except UserError as error:
        return None, error.problems
    # Its lock is taken again when the ranks select: a plan keeps no files open.
    return None if saved is None else dataclasses.replace(saved, read_lock=None), ()
