"""What writers of other trainers' checkpoints share.

Owns the comparison of a model with what a trainer reads in the settings that are written for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields
from megatron_ds.conversion.model_settings import ModelSettings, resolved
from megatron_ds.conversion.source import SourceCheckpoint, declared_weights
from megatron_ds.conversion.trainers.layout import TrainerNames, layout_of, their_tensors
from megatron_ds.conversion.trainers.open_model import settings_of
from megatron_ds.engine.states.state_reader import TensorReader

TIED = "untie_embeddings_and_output_weights"


def check_expressed(
    source: SourceCheckpoint,
    name: str,
    values: Mapping[str, Any],
    read: Callable[[ConfigValues], Fields],
    ignored: tuple[str, ...] = (),
) -> None:
    """Checks that a trainer's settings describe a model.

    Args:
        source: The model.
        name: The trainer's format.
        values: The settings as they are written.
        read: Reads them.
        ignored: Keys of the settings that `read` does not, and names of options that may differ.

    Raises:
        UserError: If they are another model's: the trainer lacks parts of this one.
    """
    try:
        written = settings_of(ConfigValues(Path(name), values), read, ignored)
    except UserError as error:
        raise user_error("foreign-target-lacks", name=name, parts=str(error)) from error
    raise_if_different(source.settings, written, name, ignored)


def raise_if_different(
    settings: ModelSettings, written: ModelSettings, name: str, ignored: tuple[str, ...] = ()
) -> None:
    """Raises:
    UserError: If settings as they are read back are another model's.
    """
    expected = _comparable(settings)
    theirs = _comparable(written)
    different = sorted(
        key for key in {*theirs, *expected} - {*ignored} if theirs.get(key) != expected.get(key)
    )
    if different:
        parts = ", ".join(f"{key} {expected.get(key)}" for key in different)
        raise user_error("foreign-target-lacks", name=name, parts=parts)


def _comparable(settings: ModelSettings) -> dict[str, Any]:
    """The options of a model that differ only if the models do."""
    model = settings.model
    moe = settings.moe
    values = resolved(ModelSettings.of(model, moe, None, None))
    if moe.is_used:
        values["moe_ffn_hidden_size"] = moe.width(model)
        if all(map(moe.has_experts, range(model.num_layers))):
            values.pop("ffn_hidden_size", None)
    return values


def weights_for(
    source: SourceCheckpoint, names: TrainerNames, prefix: str = "", *, with_copy: bool
) -> dict[str, TensorReader]:
    """The tensors of a trainer, under their names.

    Args:
        source: The model.
        names: The trainer's names.
        prefix: Start of all names.
        with_copy: Whether a tied output layer is written a second time.
    """
    settings = source.settings
    weights = declared_weights(settings.model, settings.moe)
    theirs = their_tensors(layout_of(settings, names), source.tensors, weights)
    if with_copy and not settings.model.untie_embeddings_and_output_weights:
        head, table = (f"{names.outer[module]}.weight" for module in ("head", "embedding.word"))
        theirs[head] = theirs[table]
    return {f"{prefix}{name}": tensor for name, tensor in theirs.items()}
