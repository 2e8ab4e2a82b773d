"""Opens the model of another trainer, of its settings and its tensors.

Owns what is refused whatever the trainer is: parts that our model lacks, unknown settings, tensors
that are missing, unknown, or of another shape or type. All reasons of a kind are in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.fields import field_problems
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.conversion.finite_tensors import finite
from megatron_ds.conversion.huggingface.config_rows import EXPERT_FIELDS, ConfigValues, Fields
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values
from megatron_ds.conversion.source import TYPES, SourceCheckpoint, check_sizes, declared_weights
from megatron_ds.conversion.trainers.layout import Piece, TrainerNames, joined, layout_of
from megatron_ds.engine.states.state_reader import VOCABULARY_TABLES, TensorReaders
from megatron_ds.parallel.weights import Weight


def file_in(folder: Path, name: str) -> Path:
    """A file of a checkpoint.

    Raises:
        UserError: If it is missing, no regular file, or a link to a file outside of the folder.
    """
    path = folder / name
    if not path.is_file():
        raise user_error("checkpoint-file-missing", name=path)
    if not path.resolve().is_relative_to(folder.resolve()):
        raise user_error("foreign-link-outside", path=path)
    return path


def settings_of(
    config: ConfigValues, read: Callable[[ConfigValues], Fields], ignored: Collection[str] = ()
) -> ModelSettings:
    """The options of a model, of the settings of its trainer.

    Args:
        config: The settings.
        read: Returns the values by field of `ModelConfig` and `MoEConfig`, and notes what our model
            lacks in `config.lacking`.
        ignored: Keys that change nothing of the model.

    Raises:
        UserError: If a setting is missing or malformed, unknown, or of a part that our model lacks.
    """
    with malformed_values(config.path):
        fields = {name: value for name, value in read(config).items() if value is not None}
        unknown = sorted(config.values.keys() - config.used - {*ignored})
        for key in unknown:
            config.lack("an unknown setting", key, config.values[key])
        if config.lacking:
            parts = "; ".join(config.lacking)
            raise user_error("foreign-parts-lacking", path=config.path, parts=parts)
        moe = MoEConfig(**{name: fields.pop(name) for name in EXPERT_FIELDS & fields.keys()})
        model = ModelConfig(**fields)
        problems = [*field_problems(model), *model.problems(1)]
        problems += [*field_problems(moe), *moe.problems(model, 1, 1)]
        if problems:
            shown = "; ".join(problem.render() for problem in problems)
            raise user_error("foreign-file-unreadable", path=config.path, error=shown)
        return ModelSettings.of(model, moe, None, None)


def open_model(
    path: Path,
    name: str,
    settings: ModelSettings,
    theirs: TensorReaders,
    names: TrainerNames,
    notes: Iterable[Problem] = (),
) -> SourceCheckpoint:
    """The weights of a model.

    Args:
        path: Folder of the checkpoint.
        name: Its format.
        settings: Options of the model. Rows of vocabulary tables after the vocabulary are padding.
        theirs: All tensors of the model by the trainer's names.
        names: The trainer's names.
        notes: Warnings for the user.

    Raises:
        UserError: If tensors are missing, unknown, or of another shape or type.
    """
    check_sizes(settings, theirs, path)
    if not settings.model.untie_embeddings_and_output_weights:
        theirs = _without_copy(path, theirs, names)
    weights = declared_weights(settings.model, settings.moe)
    layout = layout_of(settings, names)
    pieces = {piece.name: (key, piece) for key in layout for piece in layout[key]}
    raise_if_any(_name_problems(path, theirs, pieces))
    raise_if_any(
        problem
        for key, parts in layout.items()
        for piece in parts
        for problem in _shape_problems(key, piece, weights[key], theirs)
    )
    tensors = {}
    for key, parts in layout.items():
        read = [finite(theirs[piece.name], piece.name, path) for piece in parts]
        tensors[key] = joined(parts, read, weights[key])
    source = SourceCheckpoint(path, name, settings, tensors, notes=tuple(notes))
    return source.checked()


def _without_copy(path: Path, theirs: TensorReaders, names: TrainerNames) -> TensorReaders:
    """The tensors without the output layer of a model that ties it to the embedding.

    Raises:
        UserError: If both are there and differ.
    """
    head, table = (f"{names.outer[module]}.weight" for module in ("head", "embedding.word"))
    if head not in theirs or table not in theirs:
        return theirs
    copy = theirs[head]
    original = theirs[table]
    is_same = (copy.shape, copy.dtype) == (original.shape, original.dtype)
    if not is_same or not torch.equal(copy.read(), original.read()):
        raise user_error("foreign-tied-weights-differ", path=path, head=head, table=table)
    return {name: tensor for name, tensor in theirs.items() if name != head}


def padded_rows(settings: ModelSettings) -> ModelSettings:
    """The settings of a model whose last ids may belong to no token, as of padding that the
    trainer's own loss and logits have."""
    return replace(settings, may_have_padding=True)


def _name_problems(path: Path, theirs: TensorReaders, pieces: Collection[str]) -> Iterator[Problem]:
    if missing := sorted({*pieces} - theirs.keys()):
        yield Problem("foreign-tensors-missing", path=path, names=", ".join(missing))
    if unknown := sorted(theirs.keys() - {*pieces}):
        yield Problem("foreign-tensors-unknown", path=path, names=", ".join(unknown))


def _shape_problems(
    key: str, piece: Piece, ours: Weight, theirs: TensorReaders
) -> Iterator[Problem]:
    tensor = theirs[piece.name]
    shape = list(tensor.shape)
    inner = ours.shape[2:] if ours.is_stacked else ours.shape[1:]
    expected = [piece.rows, *inner]
    if piece.expert is not None:
        expected = [ours.shape[0], *expected]
    if key in VOCABULARY_TABLES and shape and shape[0] > expected[0]:
        expected[0] = shape[0]
    if shape != expected:
        texts = {"name": piece.name, "shape": shape, "expected": expected}
        yield Problem("weights-shape-mismatch", **texts)
    if tensor.dtype not in TYPES:
        yield Problem("weights-type-unsupported", name=piece.name, dtype=tensor.dtype)
