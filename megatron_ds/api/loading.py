"""Loads a trained model for a Python program. Imports torch when a model is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ds.api.language_model import LanguageModel


def load(location: str, *, precision: str | None = None) -> LanguageModel:
    """Loads a trained model and its tokenizer onto this process's device.

    Args:
        location (`str`):
            The *--save* folder of a run, of which the newest checkpoint is loaded; a single
            checkpoint; weights in any format that is converted, such as a folder of Hugging Face;
            `hf:OWNER/NAME` of its Hub; or a URL such as `s3://BUCKET/FOLDER`.
        precision (`str`, *optional*):
            `"fp32"`, `"bf16"` or `"fp16"`. Defaults to the type in which the model was trained.

    Returns:
        [`LanguageModel`]: The model, in evaluation mode.

    Raises:
        UserError: If there is no checkpoint, or it is damaged, or its tokenizer cannot be built.

    Example:
        ```python
        >>> model = megatron_ds.load("checkpoints")
        >>> model.generate("Once upon a time", max_new_tokens=32, greedy=True)
        ```
    """
    from megatron_ds.config.problems import raise_if_any, user_error
    from megatron_ds.inference.cli import (
        PRECISIONS,
        CheckpointOptions,
        GenerationOptions,
        loaded_model,
        open_checkpoint,
    )
    from megatron_ds.launch import environment

    if precision not in (None, *PRECISIONS):
        raise user_error("unknown-precision", value=precision, valid=", ".join(PRECISIONS))
    chosen: dict[str, Any] = {} if precision is None else {precision: True}
    checkpoint = CheckpointOptions(load=str(location), **chosen)
    raise_if_any(checkpoint.problems())
    options = GenerationOptions(checkpoint=checkpoint)
    environment.prepare_environment()
    from megatron_ds.api.language_model import LanguageModel

    with environment.unchanged_ranks():
        source, _, tokenizer = open_checkpoint(options, raise_if_any)
        with loaded_model(options, source) as (model, mesh):
            pass  # the group of this process alone ends here; what follows communicates with none
    return LanguageModel(model, tokenizer, source, mesh)
