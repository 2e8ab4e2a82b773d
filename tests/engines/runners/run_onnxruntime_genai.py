"""Runs models in onnxruntime-genai, built by its own builder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import numpy as np
import onnxruntime_genai as engine
from onnxruntime_genai.models.builder import create_model, parse_extra_options

END = 0
"""Id of the token that ends documents."""


class OnnxModel:
    def __init__(self, folder: str, scratch: str) -> None:
        built = Path(scratch) / "built"
        settings = ("", folder, str(built), "fp32", "cpu", str(Path(scratch) / "cache"))
        create_model(*settings, **parse_extra_options(*settings, []))
        self._model = engine.Model(str(built))
        self._tokenizer = engine.Tokenizer(self._model)

    def _generator(self, ids: Any, length: int) -> Any:
        settings = engine.GeneratorParams(self._model)
        settings.set_search_options(max_length=length, do_sample=False)
        generator = engine.Generator(self._model, settings)
        generator.append_tokens(np.array([ids], np.int32))
        return generator

    def log_probabilities(self, ids: list[int]) -> Any:
        generator = self._generator(ids, len(ids) + 1)
        return cases.log_softmax(np.array(generator.get_output("logits"))[0])

    def continued(self, prompt: str, new: int) -> str:
        ids = [*self._tokenizer.encode(prompt)]
        generator = self._generator(ids, len(ids) + new)
        found: list[int] = []
        while len(found) < new and not generator.is_done():
            generator.generate_next_token()
            found.append(int(generator.get_next_tokens()[0]))
        found = [token for token in found if token != END]
        return str(self._tokenizer.decode(np.array(found, np.int32)))


if __name__ == "__main__":
    cases.run(OnnxModel)
