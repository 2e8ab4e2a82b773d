"""The options of a model as other formats store them, and the JSON files that have them.

Imports no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.compatibility import CHANGEABLE_FIELDS
from megatron_ds.config import ModelConfig, MoEConfig, TokenizerConfig
from megatron_ds.config.fields import option_fields
from megatron_ds.config.problems import UserError, user_error
from megatron_ds.conversion.json_files import read_json

MALFORMED = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Errors of code that gets a value of another type or size than it expects."""


@dataclass(frozen=True)
class ModelSettings:
    """The options of a model, as a format stores them."""

    fixed: Mapping[str, Any]
    """Values by field of `ModelConfig` or `MoEConfig` that the weights determine. A run with other
    values is another model. `vocab_size` counts the rows without padding."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The same for fields that a run may change, such as `seq_length` and dropout."""
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    """Values by field of `TokenizerConfig`, with the paths of existing files; empty if unknown."""
    special_ids: Mapping[str, Any] = field(default_factory=dict)
    """Token ids by name, such as `eos_token_id`, as far as they are known."""
    model_type: str | None = None
    """Name of the family in Hugging Face's library; None for a model of another origin."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """Entries of its generation_config.json, such as a temperature."""
    published: Mapping[str, Any] = field(default_factory=dict)
    """Description of the Hugging Face model that it was initialized from, as `Publication.asdict`
    returns it; empty for a model of another origin."""
    may_have_padding: bool = False
    """Whether `vocab_size` may count padding, because the format does not record its rows."""

    @classmethod
    def of(
        cls, model: ModelConfig, moe: MoEConfig, tokenizer: TokenizerConfig | None, eod: int | None
    ) -> ModelSettings:
        """The settings of a model of this program.

        Args:
            model: Its architecture, with the vocabulary size.
            moe: Its experts.
            tokenizer: Its tokenizer, with the paths of existing files. None: unknown.
            eod: Id of the end-of-document token. None: unknown.
        """
        derived = model.derived_values | {"moe_ffn_hidden_size": moe.width(model)}
        values = {
            item.name: derived.get(item.name, getattr(group, item.name))
            for group in (model, moe)
            for item, spec in option_fields(group)
            if spec.unmet(group) is None
        }
        present = {name: value for name, value in values.items() if value is not None}
        return cls(
            fixed={name: present[name] for name in present if name not in CHANGEABLE_FIELDS},
            defaults={name: present[name] for name in present if name in CHANGEABLE_FIELDS},
            tokenizer={} if tokenizer is None else dataclasses.asdict(tokenizer),
            special_ids={} if eod is None else {"eos_token_id": eod},
        )

    @property
    def model(self) -> ModelConfig:
        return ModelConfig(**_fields_of(ModelConfig, self))

    @property
    def moe(self) -> MoEConfig:
        return MoEConfig(**_fields_of(MoEConfig, self))

    def without_predictions(self) -> ModelSettings:
        """The settings without multi-token prediction."""
        return dataclasses.replace(self, fixed={**self.fixed, "mtp_num_layers": 0})

    @property
    def may_have_unused_rows(self) -> bool:
        """Whether rows of the vocabulary tables may belong to no id."""
        return self.may_have_padding or self.model_type is not None

    @property
    def tokenizer_config(self) -> TokenizerConfig | None:
        return TokenizerConfig(**self.tokenizer) if self.tokenizer else None


def resolved(settings: ModelSettings) -> dict[str, Any]:
    """The fixed values, with each layer that has experts, however they are given."""
    fixed = dict(settings.fixed)
    moe = settings.moe
    model = settings.model
    fixed.pop("expert_interval", None)
    layers = [int(moe.has_experts(layer)) for layer in range(model.num_layers)]
    return fixed | {"moe_layer_freq": layers if moe.is_used else None}


def read_json_object(path: Path) -> dict[str, Any]:
    """Raises:
    UserError: If the file is not a JSON object.
    """
    try:
        value = read_json(path)
    except ValueError as error:
        raise user_error("foreign-file-unreadable", path=path, error=error) from error
    if not isinstance(value, dict):
        raise user_error("foreign-file-unreadable", path=path, error="it is not a JSON object")
    return value


@contextmanager
def malformed_values(path: Path, code: str = "foreign-file-unreadable") -> Iterator[None]:
    """Rejects a file whose values are not of the types that its format has, wherever they are used.

    Args:
        path: Path in the error message.
        code: Kind of the problem.

    Raises:
        UserError: If the block raises one of `MALFORMED`.
    """
    try:
        yield
    except UserError:
        raise
    except MALFORMED as error:
        shown = f"{type(error).__name__}: {error}"
        raise user_error(code, path=path, error=shown) from error


def _fields_of(cls: type[ModelConfig | MoEConfig], settings: ModelSettings) -> dict[str, Any]:
    known = {item.name for item in dataclasses.fields(cls)}
    values = {**settings.defaults, **settings.fixed}
    return {name: value for name, value in values.items() if name in known}
