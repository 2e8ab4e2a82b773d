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

from megatron_ds.checkpoint.compatibility import rope_fields
from megatron_ds.config import CheckpointConfig, Config
from megatron_ds.config.options.checkpoint import TRAINERS, split_location
from megatron_ds.config.options.optimizer_specs import ADAM
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.conversion.foreign.contents import FolderContents
from megatron_ds.conversion.foreign.trainers import detect_trainer, step_of
from megatron_ds.conversion.megatron.detect import MegatronCheckpoint, detect_megatron
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.published import Publication
from megatron_ds.conversion.weights_locations import HF, NATIVE, has_weights
from megatron_ds.engine.ds_config.fields import as_flag, field_value
from megatron_ds.loading.options_from_checkpoint import TOKENIZER_FIELDS, Warn, replace_given
from megatron_ds.train_state import TrainState

if TYPE_CHECKING:
    from megatron_ds.conversion.source import SourceCheckpoint
    from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders

RELEASE = "release"
"""Folder of a model that was published: its optimizer and its iteration do not matter."""
TABLE = "embedding.word.weight"


def find_importable(
    folder: Path, options: CheckpointConfig, checkpoint: MegatronCheckpoint | None
) -> Path | None:
    """The checkpoint of another program in a folder, or weights alone, unless a run of ours is.

    Args:
        folder: The folder.
        options: Options of --load.
        checkpoint: The result of `detect_megatron` for the folder.
    """
    if _is_named_hf(folder, options):
        return folder
    name = split_location(options.load or "")[0]
    trainer = detect_trainer(folder, name)
    if trainer is not None:
        trainer = detect_trainer(folder, name, options.step) or trainer
        return trainer.path
    if options.step is not None or options.universal_checkpoint:
        checkpoint = detect_megatron(folder, options.step, universal=options.universal_checkpoint)
    if checkpoint is None:
        return folder if has_weights(folder) else None
    return checkpoint.path


def check_import(source: SourceCheckpoint) -> Iterator[Problem]:
    """Compares the files of a native folder of weights with their checksums."""
    if source.run is None and source.format == NATIVE:
        from megatron_ds.conversion.weights_folder import check_checksums

        if (damage := check_checksums(source.path)) is not None:
            yield damage


def open_importable(
    path: Path, config: Config, warn: Warn
) -> tuple[Config, SourceCheckpoint | None, list[Problem]]:
    """Opens what `find_importable` has found, and fills the options of the model from it.

    Args:
        path: The checkpoint, or the weights.
        config: Configuration of the command line.
        warn: Called for each given option that --use-checkpoint-args replaces.

    Returns:
        The configuration, what was opened, and every option whose value contradicts it.
    """
    problems = list[Problem]()
    step = config.checkpoint.step
    try:
        source = _open(path, config)
    except UserError as error:
        return config, None, list(error.problems)
    if step is not None and not _is_of_step(source, step):
        field = "ckpt_step" if config.checkpoint.load_tag is None else "load_tag"
        problems.append(
            Problem("ckpt-step-missing", field, step=step, folder=path, names=_names_of(source))
        )
    config, differing = merge_model(config, source.settings, path, warn)
    problems += differing
    continued = continued_state(source, config)
    if "softmax_vocab_size" not in config.given and continued is not None:
        config = config.with_values({"softmax_vocab_size": source.rows})
    length = config.model.seq_length
    saved = source.settings.defaults.get("seq_length", length)
    if continued is not None and continued.consumed_samples and length != saved:
        where = source.path
        problems.append(Problem("foreign-length-differs", "seq_length", path=where, saved=saved))
    own_tokenizer = config.given & vars(config.tokenizer).keys() - {"trust_remote_code"}
    stored = source.settings.tokenizer_config
    if (publication := Publication.of(source.settings)) is not None:
        if stored is not None and own_tokenizer:
            publication = publication.with_other_tokenizer()
        config = dataclasses.replace(config, published=publication.asdict())
    if source.run is None and stored is not None and not own_tokenizer:
        if stored.trust_remote_code and not config.tokenizer.trust_remote_code:
            # A checkpoint must not enable code execution.
            problems.append(Problem("checkpoint-tokenizer-runs-code", path=path))
            stored = dataclasses.replace(stored, trust_remote_code=False)
        config = dataclasses.replace(config, tokenizer=stored)
    elif source.run is None and stored is None and not own_tokenizer:
        default = f"the default, because {path} has no tokenizer"
        config = dataclasses.replace(config, origins={**config.origins, "tokenizer_type": default})
    return config, source, problems


def merge_model(
    config: Config, settings: ModelSettings, path: Path, warn: Warn
) -> tuple[Config, list[Problem]]:
    """Fills the options of the model that are not given; compares those that are."""
    problems = list[Problem]()
    values = {**settings.defaults, **settings.fixed}
    filled = {name: value for name, value in values.items() if name not in config.given}
    rope = rope_fields(config.with_values(filled).model, settings.model)
    overridden = rope if config.checkpoint.override_rope else frozenset()
    origins = dict.fromkeys(settings.fixed.keys() - config.given - TOKENIZER_FIELDS, f"from {path}")
    for name, value in values.items():
        current = field_value(config, name)
        if name in TOKENIZER_FIELDS:
            continue
        if name not in config.given:
            config = config.with_values({name: value})
        elif name not in settings.fixed or current in (value, None) or name in overridden:
            continue
        elif config.checkpoint.use_checkpoint_args:
            config = replace_given(config, {name: value}, path, warn, "use_checkpoint_args")
        else:
            flag = as_flag(name, current)
            saved = as_flag(name, value)
            texts = {"given": flag, "path": path, "saved": saved}
            differing = Problem("foreign-setting-differs", name, **texts)
            is_rope = name in rope
            problems.append(
                Problem("foreign-rope-differs", name, **texts) if is_rope else differing
            )
    return dataclasses.replace(config, origins={**config.origins, **origins}), problems


def conflicts(source: SourceCheckpoint, config: Config, vocab_size: int) -> Iterator[Problem]:
    """Yields reasons that the checkpoint of another program cannot be loaded.

    Args:
        source: The checkpoint.
        config: Configuration that `open_importable` has filled.
        vocab_size: Number of the tokenizer's ids.
    """
    settings = source.settings
    try:
        saved = None if settings.may_have_unused_rows else settings.model.vocab_size
        rows = source.tensors[TABLE].shape[0]
        if vocab_size > rows if saved is None else vocab_size != saved:
            saved = saved or rows
            yield Problem(
                "foreign-vocabulary-differs", path=source.path, saved=saved, own=vocab_size
            )
            return
        now = {**vars(config.model), **vars(config.moe)}
        free = TOKENIZER_FIELDS
        if config.checkpoint.override_rope:
            free |= rope_fields(config.model, settings.model)
        if all(
            now[name] in (value, None) or name in free for name, value in settings.fixed.items()
        ):
            _checked(source, config.with_vocab(vocab_size))  # others contradict it already
    except UserError as error:
        yield from error.problems


@dataclass
class InitialLoad:
    """Initial state of a run; implements `StateReader`."""

    path: Path
    state: TrainState
    notes: tuple[Problem, ...]
    weights: TensorReaders
    optimizer: Mapping[str, TensorReaders] = dataclasses.field(default_factory=dict)
    """The optimizer's states by kind; empty if the run starts with the weights alone."""
    optimizer_steps: int | None = None
    loss_scaler: None = None
    _last: tuple[tuple[str, str], TensorReader] | None = None

    @classmethod
    def of(cls, source: SourceCheckpoint, config: Config) -> InitialLoad:
        """Returns the initial state of a run.

        Args:
            source: The checkpoint of another program, or weights alone.
            config: Complete configuration.

        Raises:
            UserError: If it does not fit the run.
        """
        weights = _checked(source, config)
        state = continued_state(source, config)
        if state is None:
            notes = (*source.notes, *_notes_of_weights(source, config))
            return cls(source.path, TrainState(), notes, weights)
        if config.checkpoint.no_load_optim:
            return cls(source.path, state, source.notes, weights)
        optimizer = {
            key: _checked(source, config, {**source.tensors, **tensors})  # with states of layers
            for key, tensors in source.optimizer.items()
        }
        steps = None if source.run is None else source.run.steps
        return cls(source.path, state, source.notes, weights, optimizer, steps)

    @property
    def summary(self) -> str:
        """One line for the log."""
        states = "weights and optimizer states" if self.optimizer else "weights"
        without = "" if self.optimizer else ", without optimizer states,"
        return (
            f"{states} of {self.path}{without} at iteration {self.state.iteration}, after "
            f"{self.state.consumed_samples} samples"
        )

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.weights.items()}

    @property
    def counters(self) -> Mapping[str, int]:
        return {
            "global_steps": self.state.iteration,
            "global_samples": self.state.consumed_samples,
            "skipped_steps": self.state.skipped_iterations,
        }

    def state_names(self, name: str) -> tuple[str, ...]:
        from megatron_ds.engine.states.state_reader import MASTER

        return tuple(key for key in self.optimizer if key != MASTER)

    def steps(self, name: str) -> int | None:
        return self.optimizer_steps

    def tensor(self, name: str, key: str) -> TensorReader:
        """The full tensor. It is read in blocks: one that can only be read completely is kept in
        memory until the next one is."""
        from megatron_ds.engine.states.state_reader import TensorReader

        reader = self.optimizer.get(key, self.weights)[name]
        if not reader.is_indivisible:
            return reader
        if self._last is None or self._last[0] != (name, key):
            self._last = (name, key), TensorReader.of(reader.read())
        return self._last[1]


def _notes_of_weights(source: SourceCheckpoint, config: Config) -> Iterator[Problem]:
    """Yields notes on what a run that starts with the weights alone leaves out."""
    rows = source.tensors[TABLE].shape[0]
    used = config.model.softmax_rows
    if source.run is None:  # such folders have no optimizer
        if rows > used:
            yield Problem("foreign-rows-unused", path=source.path, rows=rows, used=used)
    elif not config.checkpoint.finetune:
        reason = _why_weights_alone(source, config)
        yield Problem("foreign-weights-alone", path=source.path, reason=reason)


def _why_weights_alone(source: SourceCheckpoint, config: Config) -> str | None:
    if source.path.name == RELEASE:
        return "the tracker says `release`"
    if config.checkpoint.finetune:
        return "a new run starts with them"
    is_without = config.checkpoint.no_load_optim
    run = source.run
    if run is None or not (source.optimizer or is_without):
        return source.unread
    if config.optimizer.spec is not ADAM and not is_without:
        return "its optimizer states are those of Adam"
    is_counted = run.consumed_samples is not None or run.settings is not None
    if not is_counted or (run.steps is None and not is_without):
        return "it does not contain the number of samples that were read, or of steps"
    return None


def continued_state(source: SourceCheckpoint, config: Config) -> TrainState | None:
    """The counters of the run that is continued; None if only the weights are loaded."""
    if _why_weights_alone(source, config) is not None:
        return None
    run = source.run
    assert run is not None
    consumed = run.consumed_samples or 0  # known when the batch sizes are
    applied = run.applied_samples
    steps = run.iteration if run.steps is None else run.steps
    applied = consumed if applied is None else applied
    length = source.settings.defaults.get("seq_length", config.model.seq_length)
    state = TrainState(
        iteration=run.iteration,
        consumed_samples=consumed,
        consumed_tokens=consumed * length,
        applied_samples=applied,
        applied_tokens=applied * length,
        applied_iterations=min(steps, run.iteration),  # Adam may have counted one more
        skipped_iterations=max(0, run.iteration - steps),
    )
    return state.restarted() if config.checkpoint.reset_iteration else state


def _is_of_step(source: SourceCheckpoint, step: int) -> bool:
    """Whether a checkpoint is that of a step, by its files or by the name of its folder."""
    if source.format in TRAINERS:
        return step in (source.iteration, step_of(source.path))
    return source.run is not None  # of Megatron's, the one of the step was chosen


def _names_of(source: SourceCheckpoint) -> str:
    """What a folder has instead of the step that was asked for."""
    step = source.iteration if step_of(source.path) is None else step_of(source.path)
    return "weights alone" if step is None else f"step {step}"


def _is_named_hf(folder: Path, options: CheckpointConfig) -> bool:
    """Whether hf: names a folder with a model, which may have files of DeepSpeed, too."""
    is_named = split_location(options.load or "")[0] == HF
    return is_named and FolderContents(folder).is_model_of_transformers


def _open(path: Path, config: Config) -> SourceCheckpoint:
    from megatron_ds.conversion.registry import AUTO, recognize
    from megatron_ds.conversion.source import ReadOptions

    model = {**dataclasses.asdict(config.model), **dataclasses.asdict(config.moe)}
    checkpoint = config.checkpoint
    options = ReadOptions(
        optimizer=not (checkpoint.finetune or checkpoint.no_load_optim),
        run=not checkpoint.finetune,
        checksums=False,
        model=model,
        given=config.given,
    )
    name = split_location(config.checkpoint.load or "")[0]
    if name not in TRAINERS:
        name = HF if _is_named_hf(path, config.checkpoint) else AUTO
    source = recognize(path, name).open(path, options)
    depths = source.settings.model.mtp_num_layers if "mtp_num_layers" in config.given else 0
    if not depths or config.model.mtp_num_layers:
        return source
    note = Problem("foreign-predictions-left-out", "mtp_num_layers", path=path, depths=depths)
    return dataclasses.replace(source.without_predictions(), notes=(*source.notes, note))


def _checked(
    source: SourceCheckpoint, config: Config, tensors: TensorReaders | None = None
) -> TensorReaders:
    """The weights, or other tensors, with the names and shapes of the run's model."""
    rows = dataclasses.replace(config.model, vocab_size=config.model.softmax_rows)
    settings = ModelSettings.of(rows, config.moe, None, None)
    tensors = source.tensors if tensors is None else tensors
    return dataclasses.replace(source, settings=settings, tensors=tensors).weights().tensors
