"""Runs models in mistral.rs, on the CPU, with a chat template that it needs to load any model."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["MISTRALRS_CPU_KV_F32"] = "1"

import cases
import numpy as np
from mistralrs import ChatCompletionRequest, ModelDType, Runner, Which
from tokenizers import Tokenizer

TEMPLATE = '{"chat_template": "{{ messages[0].content }}"}'
LIKELIEST = 10
"""Tokens whose log probabilities are compared after each prompt."""
LENGTHS = (12, 40, 127)
"""Tokens of prompts."""


class MistralModel:
    def __init__(self, folder: str, scratch: str) -> None:
        template = Path(scratch) / "template.json"
        template.write_text(TEMPLATE, encoding="utf-8")
        self._runner = Runner(
            which=Which.Plain(model_id=folder, dtype=ModelDType.F32),
            chat_template=str(template),
            prefix_cache_n=0,
        )
        self._tokenizer = Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))

    def _complete(self, prompt: str, new: int) -> Any:
        request = ChatCompletionRequest(
            messages=prompt,
            model="default",
            max_tokens=new,
            temperature=0.0,
            top_k=1,
            logprobs=True,
            top_logprobs=LIKELIEST,
        )
        return self._runner.send_chat_completion_request(request).choices[0]

    def log_probabilities(self, ids: list[int]) -> Any:
        values = np.full((len(ids), self._tokenizer.get_vocab_size()), np.nan)
        for length in LENGTHS:
            prompt = self._tokenizer.decode(ids[:length], skip_special_tokens=False)
            if self._tokenizer.encode(prompt).ids != ids[:length]:
                raise ValueError(f"the text of {length} tokens has other ids")
            (first,) = self._complete(prompt, 1).logprobs.content
            for entry in first.top_logprobs:
                values[length - 1, entry.token] = entry.logprob
        return values

    def continued(self, prompt: str, new: int) -> str:
        return str(self._complete(prompt, new).message.content)


if __name__ == "__main__":
    cases.run(MistralModel)
