"""Runs models in OpenVINO, exported by optimum-intel."""

from __future__ import annotations

from typing import Any

import cases
import torch
from optimum.intel import OVModelForCausalLM
from transformers import AutoTokenizer

SETTINGS = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}


class OpenVinoModel:
    def __init__(self, folder: str, scratch: str) -> None:
        self._model = OVModelForCausalLM.from_pretrained(
            folder, export=True, load_in_8bit=False, ov_config=SETTINGS
        )
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def log_probabilities(self, ids: list[int]) -> Any:
        tokens = torch.tensor([ids])
        return cases.log_softmax(self._model(tokens, torch.ones_like(tokens)).logits[0].numpy())

    def continued(self, prompt: str, new: int) -> str:
        inputs = self._tokenizer(prompt, return_tensors="pt")
        settings = {"max_new_tokens": new, "do_sample": False}
        ids = self._model.generate(
            inputs["input_ids"], attention_mask=inputs["attention_mask"], **settings
        )[0]
        return str(
            self._tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        )


if __name__ == "__main__":
    cases.run(OpenVinoModel)
