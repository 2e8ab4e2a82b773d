"""Runs GGUF files in llama.cpp, whose shared library xllamacpp has."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cases

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "interop"))
from llama_cpp import Runtime

END = 0
"""Id of the token that ends documents."""


class LlamaCppModel:
    def __init__(self, file: str, scratch: str) -> None:
        self._runtime = Runtime(file)

    def log_probabilities(self, ids: list[int]) -> Any:
        return cases.log_softmax(self._runtime.logits(ids))

    def continued(self, prompt: str, new: int) -> str:
        ids = self._runtime.encode(prompt, special=True)
        start = len(ids)
        for _ in range(new):
            token = int(self._runtime.logits(ids)[-1].argmax())
            if token == END:
                break
            ids.append(token)
        return self._runtime.decode(ids[start:])


if __name__ == "__main__":
    cases.run(LlamaCppModel)
