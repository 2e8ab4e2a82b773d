"""Runs models in CTranslate2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cases
import ctranslate2
import numpy as np
from ctranslate2.converters import TransformersConverter
from transformers import AutoTokenizer


class CTranslate2Model:
    def __init__(self, folder: str, scratch: str) -> None:
        converted = Path(scratch) / "converted"
        TransformersConverter(folder).convert(str(converted), quantization="float32", force=True)
        self._generator = ctranslate2.Generator(str(converted), compute_type="float32")
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def log_probabilities(self, ids: list[int]) -> Any:
        result = self._generator.forward_batch([ids], return_log_probs=True)
        return np.array(result, np.float32)[0]

    def continued(self, prompt: str, new: int) -> str:
        ids = self._tokenizer(prompt)["input_ids"]
        tokens = self._tokenizer.convert_ids_to_tokens(ids)
        (result,) = self._generator.generate_batch(
            [tokens], max_length=new, sampling_topk=1, include_prompt_in_result=False
        )
        return str(self._tokenizer.decode(result.sequences_ids[0][:new]))


if __name__ == "__main__":
    cases.run(CTranslate2Model)
