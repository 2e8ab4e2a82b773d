"""Starts a run from a checkpoint of another program, or from weights alone, that --load names.

Owns which of the run's options come from it, which contradict it, and the state to start with:
Megatron's iteration, samples and Adam states if they can be read, otherwise the weights alone.
Imports no torch unless there is such a checkpoint.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ds.config import GROUP_OF_FIELD, Config
from megatron_ds.config.checkpoint import FORMATS, TAG, is_remote, missing_folder, split_location
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.conversion.megatron.detect import MegatronCheckpoint, find_checkpoint
from megatron_ds.conversion.weights_locations import (
    HF,
    NATIVE,
    WeightsFolder,
    find_weights,
    is_hf,
)
from megatron_ds.engine.ds_config.fields import as_flag
from megatron_ds.loading.options_from_checkpoint import (
    SIZES,
    UNCHECKED,
    Warn,
    has_checkpoint,
    replace_given,
    with_pretrained,
    with_saved_options,
)
from megatron_ds.train_state import TrainState

if TYPE_CHECKING:
    from megatron_ds.conversion.source import ModelSettings, SourceCheckpoint
    from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders

RELEASE = "release"
"""Folder of a model that was published: its optimizer and its iteration do not matter."""
TABLE = "embedding.word.weight"


Found = MegatronCheckpoint | WeightsFolder


def find_foreign(config: Config) -> Found | None:
    """The checkpoint of another program in --load, or weights alone, unless a run of ours is."""
    options = config.checkpoint
    if options.load is None:
        return None
    folder = Path(options.load)
    return find_checkpoint(
        folder, options.step, universal=options.universal_checkpoint
    ) or find_weights(folder)


def find_damage(config: Config) -> Iterator[Problem]:
    """Compares the files of a native folder of weights with their checksums."""
    found = find_foreign(config)
    if isinstance(found, WeightsFolder) and found.kind == NATIVE:
        from megatron_ds.conversion.weights_folder import find_damage

        if (damage := find_damage(found.path)) is not None:
            yield damage


def merge_settings(
    config: Config, warn: Warn = lambda problem: None
) -> tuple[Config, list[Problem]]:
    """Fills the options of the model from the checkpoint to load.

    Args:
        config: Configuration of the command line.
        warn: Called for each given option that --use-checkpoint-args replaces.

    Returns:
        The configuration, and every option whose value contradicts the checkpoint of another
        program.
    """
    config, problems = _split_location(with_pretrained(config))
    found = find_foreign(config)
    step = config.checkpoint.step
    if isinstance(found, WeightsFolder) and step is not None:
        field = "ckpt_step" if config.checkpoint.load_tag is None else "load_tag"
        problems.append(
            Problem("ckpt-step-missing", field, step=step, folder=found.path, names="weights alone")
        )
    if found is None:
        return with_saved_options(config, warn), problems
    try:
        model = _open(found, config)
    except UserError as error:
        return config, list(error.problems)
    settings = model.settings
    for name, value in {**settings.defaults, **settings.fixed}.items():
        group = GROUP_OF_FIELD[name]
        options = getattr(config, group)
        own = getattr(options, name)
        if name in UNCHECKED:
            continue
        if name not in config.given:
            changed = dataclasses.replace(options, **{name: value})
            config = dataclasses.replace(config, **{group: changed})
        elif name not in settings.fixed or own in (value, None):
            continue
        elif config.checkpoint.use_checkpoint_args:
            config = replace_given(config, {name: value}, found.path, warn, "use_checkpoint_args")
        else:
            given, saved = as_flag(name, own), as_flag(name, value)
            problems.append(
                Problem("foreign-setting-differs", name, given=given, path=found.path, saved=saved)
            )
    continued = _continued(found, model, config)
    if "softmax_vocab_size" not in config.given and continued is not None:
        options = dataclasses.replace(config.model, softmax_vocab_size=model.rows)
        config = dataclasses.replace(config, model=options)
    problems += _length_problems(found, settings, continued, config.model.seq_length)
    own_tokenizer = config.given & vars(config.tokenizer).keys() - {"trust_remote_code"}
    stored = settings.tokenizer_config
    if isinstance(found, WeightsFolder) and stored is not None and not own_tokenizer:
        if stored.trust_remote_code and not config.tokenizer.trust_remote_code:
            # Whoever wrote the folder decides nothing about the code that runs here.
            problems.append(Problem("checkpoint-tokenizer-runs-code", path=found.path))
            stored = dataclasses.replace(stored, trust_remote_code=False)
        config = dataclasses.replace(config, tokenizer=stored)
    origins = dict.fromkeys(settings.fixed.keys() - config.given - UNCHECKED, f"from {found.path}")
    return dataclasses.replace(config, origins={**config.origins, **origins}), problems


def _length_problems(
    found: Found, settings: ModelSettings, continued: TrainState | None, length: int
) -> Iterator[Problem]:
    """Why a run cannot have its sequence length."""
    longest, saved = settings.longest_sequence, settings.defaults.get("seq_length", length)
    if longest is not None and length > longest:
        yield Problem("foreign-window-exceeded", path=found.path, length=length, longest=longest)
    if continued is not None and continued.consumed_samples and length != saved:
        yield Problem("foreign-length-differs", "seq_length", path=found.path, saved=saved)


def _split_location(config: Config) -> tuple[Config, list[Problem]]:
    """Removes the name of a format from --load, after checking that expected weights are there."""
    options = config.checkpoint
    if options.load is None:
        return config, []
    name, folder = split_location(options.load)
    problems = list[Problem]()
    is_expected = name != "auto" or options.is_new_run or config.given.isdisjoint(SIZES)
    is_there = is_hf(Path(folder)) if name == HF else has_checkpoint(folder)
    is_one = TAG.fullmatch(Path(folder).name)  # an error of its own
    if is_expected and not (is_there or is_one or is_remote(options.load)):
        shown, known = options.load_url or folder, ", ".join(FORMATS) if name == "auto" else name
        unknown = Problem("weights-format-unknown", path=shown, known=known)
        problems = [*missing_folder(options.load)] or [unknown]
        if options.load == options.pretrained_checkpoint:
            problems = [each.about(load="pretrained_checkpoint") for each in problems]
    options = dataclasses.replace(options, load=folder)
    return dataclasses.replace(config, checkpoint=options), problems


def conflicts(config: Config, vocab_size: int | None) -> Iterator[Problem]:
    """Why the checkpoint of another program cannot be loaded.

    Args:
        config: Configuration that `merge_settings` has filled.
        vocab_size: Number of the tokenizer's ids; None if it is not known.
    """
    found = find_foreign(config)
    if found is None or vocab_size is None:
        return
    try:
        model = _open(found, config)
        settings, rows = model.settings, model.tensors[TABLE].shape[0]
        saved = None if settings.may_have_unused_rows else settings.model.vocab_size
        if vocab_size > rows if saved is None else vocab_size != saved:
            saved = saved or rows
            yield Problem(
                "foreign-vocabulary-differs", path=found.path, saved=saved, own=vocab_size
            )
            return
        own = {**vars(config.model), **vars(config.moe)}
        fixed = model.settings.fixed.items()
        if all(own[name] in (value, None) for name, value in fixed if name not in UNCHECKED):
            _checked(model, config.with_vocab(vocab_size))  # others contradict it already
    except UserError as error:
        yield from error.problems


@dataclass(frozen=True)
class ForeignStart:
    """What a run starts with."""

    path: Path
    weights: TensorReaders
    optimizer: Mapping[str, TensorReaders]
    """The optimizer's states by kind; empty if the run starts with the weights alone."""
    steps: int | None
    state: TrainState
    notes: tuple[Problem, ...]

    @property
    def summary(self) -> str:
        """One line for the log."""
        states = "weights and optimizer states" if self.optimizer else "weights"
        without = "" if self.optimizer else ", without optimizer states,"
        return (
            f"{states} of {self.path}{without} at iteration {self.state.iteration}, after "
            f"{self.state.consumed_samples} samples"
        )


def open_foreign(config: Config) -> ForeignStart | None:
    """Opens the checkpoint of another program that --load names.

    Args:
        config: Complete configuration.

    Returns:
        None if --load names no such checkpoint.

    Raises:
        UserError: If it is damaged or does not fit the run.
    """
    found = find_foreign(config)
    if found is None:
        return None
    model = _open(found, config)
    weights = _checked(model, config)
    state = _continued(found, model, config)
    if state is None:
        notes = list(model.notes)
        # Other folders have no optimizer.
        if isinstance(found, MegatronCheckpoint) and not config.checkpoint.finetune:
            reason = _why_weights_alone(found, model, config)
            notes.append(Problem("foreign-weights-alone", path=found.path, reason=reason))
        rows, used = model.tensors[TABLE].shape[0], config.model.softmax_rows
        if isinstance(found, WeightsFolder) and rows > used:
            notes.append(Problem("foreign-rows-unused", path=found.path, rows=rows, used=used))
        return ForeignStart(found.path, weights, {}, None, TrainState(), tuple(notes))
    if config.checkpoint.no_load_optim:
        return ForeignStart(found.path, weights, {}, None, state, model.notes)
    optimizer = {
        kind: _checked(model, config, tensors) for kind, tensors in model.optimizer.items()
    }
    steps = None if model.run is None else model.run.steps
    return ForeignStart(found.path, weights, optimizer, steps, state, model.notes)


def _why_weights_alone(found: Found, model: SourceCheckpoint, config: Config) -> str | None:
    if found.path.name == RELEASE:
        return "the tracker says `release`"
    if config.checkpoint.finetune:
        return "a new run starts with them"
    is_without = config.checkpoint.no_load_optim
    run = model.run
    if run is None or not (model.optimizer or is_without):
        return model.unread
    is_adam = config.optimizer.optimizer == "adam" and not config.optimizer.has_8_bit_moments
    if not is_adam and not is_without:
        return "its optimizer states are those of Adam"
    if run.consumed_samples is None or (run.steps is None and not is_without):
        return "it does not contain the number of samples that were read, or of steps"
    return None


def _continued(found: Found, model: SourceCheckpoint, config: Config) -> TrainState | None:
    """The counters of the run that is continued; None if only the weights are loaded."""
    if _why_weights_alone(found, model, config) is not None:
        return None
    run = model.run
    assert run is not None
    assert run.consumed_samples is not None
    consumed, applied = run.consumed_samples, run.applied_samples
    steps = run.iteration if run.steps is None else run.steps
    applied = consumed if applied is None else applied
    length = model.settings.defaults.get("seq_length", config.model.seq_length)
    state = TrainState(
        iteration=run.iteration,
        consumed_samples=consumed,
        consumed_tokens=consumed * length,
        applied_samples=applied,
        applied_tokens=applied * length,
        applied_iterations=steps,
        skipped_iterations=max(0, run.iteration - steps),
    )
    return state.restarted() if config.checkpoint.reset_iteration else state


def _open(found: Found, config: Config) -> SourceCheckpoint:
    from megatron_ds.conversion.registry import recognize
    from megatron_ds.conversion.source import ReadOptions

    model = dataclasses.asdict(config.model)
    options = ReadOptions(optimizer=True, checksums=False, model=model)
    return recognize(found.path).open(found.path, options)


def _checked(
    source: SourceCheckpoint, config: Config, tensors: TensorReaders | None = None
) -> TensorReaders:
    """The weights, or other tensors, with the names and shapes of the run's model."""
    from megatron_ds.conversion.source import ModelSettings

    rows = dataclasses.replace(config.model, vocab_size=config.model.softmax_rows)
    settings = ModelSettings.of(rows, config.moe, None, None)
    tensors = source.tensors if tensors is None else tensors
    return dataclasses.replace(source, settings=settings, tensors=tensors).weights().tensors


class StartStates:
    """The states of a `ForeignStart` for an engine; implements `StateReader`."""

    def __init__(self, start: ForeignStart) -> None:
        self._start = start
        self._last: tuple[tuple[str, str], TensorReader] | None = None
        self.shapes = {name: tensor.shape for name, tensor in start.weights.items()}
        self.counters = {
            "global_steps": start.state.iteration,
            "global_samples": start.state.consumed_samples,
            "skipped_steps": start.state.skipped_iterations,
        }
        self.loss_scaler = None

    def moments(self, name: str) -> tuple[str, ...]:
        from megatron_ds.engine.states.state_reader import MASTER

        return tuple(kind for kind in self._start.optimizer if kind != MASTER)

    def steps(self, name: str) -> int | None:
        return self._start.steps

    def tensor(self, name: str, kind: str) -> TensorReader:
        """The full tensor; the last one is kept in memory, because it is read in blocks."""
        from megatron_ds.engine.states.state_reader import TensorReader

        if self._last is None or self._last[0] != (name, kind):
            tensors = self._start.optimizer.get(kind, self._start.weights)
            self._last = (name, kind), TensorReader.of(tensors[name].read())
        return self._last[1]
