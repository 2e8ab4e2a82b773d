"""Sentence splitters of tests, which need no model of nltk, and a small model of punkt."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True)
class Marks:
    """Splits after each mark that ends a sentence."""

    keep_newlines: bool = False

    @property
    def description(self) -> dict[str, Any]:
        return {"splitter": "marks", "keep_newlines": self.keep_newlines}

    def __call__(self, text: str) -> list[str]:
        found = re.findall(r"\S[^.!?]*[.!?]*\s*", text.strip())
        return found if self.keep_newlines else [each.strip() for each in found]


class Lines:
    """A splitter whose sentences are lines, including blank ones."""

    description: dict[str, Any] = {"splitter": "lines"}  # noqa: RUF012

    def __call__(self, text: str) -> list[str]:
        return text.split("\n")


def write_punkt_model(folder: Path) -> None:
    """Writes a model of the language `small` to nltk's data in a folder."""
    punkt = pytest.importorskip("nltk.tokenize.punkt")
    text = " ".join(
        f"The man saw approx. {n} birds. A bird sang to approx. {n} men. Then the birds left."
        for n in range(40)
    )
    parameters = punkt.PunktTrainer(text).get_params()
    model = folder / "tokenizers" / "punkt_tab" / "small"
    model.mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nltk.data.path", [str(folder)])  # nltk writes nowhere else
        punkt.save_punkt_params(parameters, dir=str(model))
