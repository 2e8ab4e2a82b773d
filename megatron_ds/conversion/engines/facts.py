"""The table of what inference engines make of exported models. Imports no torch.

facts.toml has it; the export, docs/use/engines.md and the proof that runs the engines read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.data_files import read_table

TABLES = read_table(__file__)
REFUSES = "refuses"
DIFFERS = "differs"
CLOSE = "close"
EFFECTS = (REFUSES, DIFFERS, CLOSE)
PLAIN_NAMES = "plain-names"
"""Names of tensors without the family's prefix."""
SPECIAL_TOKENS = "special-tokens"
"""A begin and an unknown token, which are the end token: no text gets them."""
ADAPTATIONS = (PLAIN_NAMES, SPECIAL_TOKENS)


@dataclass(frozen=True)
class Engine:
    """A program that runs exported models; facts.toml explains what it has."""

    title: str
    package: str
    version: str
    format: str


@dataclass(frozen=True)
class Fact:
    """A property of models with which an engine refuses them, or computes another model."""

    engine: str
    key: str
    effect: str
    why: str
    source: str
    families: Sequence[str] = ()
    values: Sequence[Any] | None = None
    other_than: Sequence[Any] | None = None
    difference: float | None = None
    only_on: str = ""
    adapt: str = ""

    def holds(self, family: str, properties: Mapping[str, Any]) -> bool:
        """Whether it holds for a model.

        Args:
            family: Its model_type.
            properties: Values by key; an absent or null one is an empty text.
        """
        if self.families and family not in self.families:
            return False
        value = properties.get(self.key)
        value = "" if value is None else value
        if self.values is not None:
            return value in self.values
        return self.other_than is None or value not in self.other_than


ENGINES = {name: Engine(**values) for name, values in TABLES["engines"].items()}
"""Engines by name."""
FACTS = tuple(Fact(**values) for values in TABLES["facts"])


def facts_of(engine: str, family: str, properties: Mapping[str, Any]) -> list[Fact]:
    """The facts of an engine that hold for a model."""
    return [fact for fact in FACTS if fact.engine == engine and fact.holds(family, properties)]
