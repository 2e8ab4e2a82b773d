"""Metadata of a Hugging Face model other than its weights and options.

A run that starts with its weights keeps it in its checkpoints, from which an export takes it: the
family, the number of positions, special tokens and settings of generation. Imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.checkpoint.compatibility import ROPE_FIELDS
from megatron_ds.conversion.model_settings import ModelSettings

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
END = "eos_token_id"
DOCUMENTS = ("copying", "licence", "license", "notice", "readme", "use_policy")
"""Starts of the names of files about a model, in lower case."""


@dataclass(frozen=True)
class Publication:
    """Metadata in the folder of a Hugging Face model."""

    path: str
    """The folder, for messages."""
    model_type: str
    positions: int | None = None
    """`max_position_embeddings`; None if the family has none."""
    rope: Mapping[str, Any] = field(default_factory=dict)
    """Rotary base and scaling options that give these positions."""
    special_ids: Mapping[str, Any] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)
    has_prefix: bool = True
    """Whether the names of its tensors start with the family's prefix."""
    has_tokenizer: bool = True
    """Whether the model has its published tokenizer."""
    documents: Sequence[str] = ()
    """Names of files about the model, such as its license, which are not copied."""
    lost: Sequence[str] = ()
    """Descriptions of metadata that a run could not keep."""

    @classmethod
    def of(cls, settings: ModelSettings) -> Publication | None:
        """The publication in some settings, if there is one.

        Raises:
            TypeError: If they have another one than `asdict` gives.
        """
        return cls(**settings.published) if settings.published else None

    @classmethod
    def of_folder(cls, path: Path, settings: ModelSettings, *, has_prefix: bool) -> Publication:
        """The publication of a folder of a model.

        Args:
            path: The folder.
            settings: Settings in its config.json and generation_config.json.
            has_prefix: Whether the names of tensors start with the family's prefix.
        """
        names = sorted(file.name for file in path.iterdir() if file.is_file())
        documents = [name for name in names if name.lower().startswith(DOCUMENTS)]
        return cls(
            str(path),
            str(settings.model_type),
            settings.defaults.get("seq_length"),
            _rope(settings),
            dict(settings.special_ids),
            dict(settings.generation),
            has_prefix,
            documents=documents,
        )

    def asdict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        values: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(self)))
        return values

    def with_other_tokenizer(self) -> Publication:
        """The publication of a model that is trained with another tokenizer, without token ids."""
        generation = {
            name: value for name, value in self.generation.items() if not name.endswith("token_id")
        }
        lost = (*self.lost, "the ids of special tokens (another tokenizer)")
        # Null, because the family's configuration class has defaults for absent ones.
        ids = dict.fromkeys(SPECIAL_IDS)
        return dataclasses.replace(
            self, special_ids=ids, generation=generation, has_tokenizer=False, lost=lost
        )

    def applied(self, settings: ModelSettings) -> ModelSettings:
        """The settings of a trained model with its publication.

        Args:
            settings: Options of the run, with the id that ends its documents.
        """
        ids = dict(self.special_ids)
        generation = dict(self.generation)
        lost = list(self.lost)
        ends = {*_listed(ids.get(END)), *_listed(generation.get(END))}
        end = settings.special_ids.get(END)
        if end is not None and end not in ends:
            if ends:
                lost.append(f"{END} {sorted(ends)} (documents of the run end with {end})")
            ids[END] = end
            generation.pop(END, None)
        kept = dataclasses.replace(self, lost=lost)
        return dataclasses.replace(
            settings,
            model_type=self.model_type,
            special_ids=ids,
            generation=generation,
            published=kept.asdict(),
        )

    def holds_positions(self, settings: ModelSettings) -> bool:
        """Whether the rotation of a trained model is still the original one."""
        now, published = (json.dumps(fields) for fields in (_rope(settings), dict(self.rope)))
        return now == published

    def lost_in(self, settings: ModelSettings, model_type: str) -> list[str]:
        """Describes the metadata that an export of a model does not keep.

        Args:
            settings: Settings of the model.
            model_type: Family as which it is written.
        """
        lost = [*self.lost]
        if model_type != self.model_type:
            lost.append(f"model_type {self.model_type}")
        if not self.holds_positions(settings):
            lost.append(f"max_position_embeddings {self.positions} (other rotary positions)")
        return [*lost, *self.documents]


def with_positions(settings: ModelSettings) -> ModelSettings:
    """The settings with the positions of the published model instead of the run's sequence length,
    unless its rotation was changed or its sequences are longer."""
    publication = Publication.of(settings)
    if publication is None or not publication.positions:
        return settings
    length = max(settings.model.seq_length, publication.positions)
    if not publication.holds_positions(settings):
        return settings
    return dataclasses.replace(settings, defaults={**settings.defaults, "seq_length": length})


def _rope(settings: ModelSettings) -> dict[str, Any]:
    """The options of the rotation, in a fixed order."""
    names = ROPE_FIELDS & settings.fixed.keys()
    if settings.model.rope_ntk_factor is None:
        names -= {"max_position_embeddings"}  # without an effect on the rotation
    return {name: settings.fixed[name] for name in sorted(names)}


def _listed(ids: Any) -> list[Any]:
    """One id, several, or none."""
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]
