"""Runs models in mlx-lm, on the CPU."""

from __future__ import annotations

from typing import Any

import cases
import mlx.core as mx
import numpy as np
from mlx_lm import generate
from mlx_lm import load as load_model


class MlxModel:
    def __init__(self, folder: str, scratch: str) -> None:
        self._model, self._tokenizer = load_model(folder)

    def log_probabilities(self, ids: list[int]) -> Any:
        logits = self._model(mx.array(ids)[None])
        return cases.log_softmax(np.array(logits[0].astype(mx.float32)))

    def continued(self, prompt: str, new: int) -> str:
        return str(generate(self._model, self._tokenizer, prompt=prompt, max_tokens=new))


if __name__ == "__main__":
    mx.set_default_device(mx.cpu)
    cases.run(MlxModel)
