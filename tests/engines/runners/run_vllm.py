"""Runs models in vLLM, on the CPU and in one process."""

from __future__ import annotations

import os
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}

import cases
from vllm import LLM, SamplingParams

LENGTH = 192
"""Tokens of a sequence, prompt and continuation."""


class VllmModel:
    def __init__(self, folder: str, scratch: str) -> None:
        self._engine = LLM(
            folder, dtype="float32", max_model_len=LENGTH, enforce_eager=True, seed=0,
            enable_prefix_caching=False,
        )  # fmt: skip

    def log_probabilities(self, ids: list[int]) -> Any:
        settings = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
        (result,) = self._engine.generate({"prompt_token_ids": ids}, settings, use_tqdm=False)
        entries = zip(ids[1:], result.prompt_logprobs[1:], strict=True)
        return [entry[token].logprob for token, entry in entries]

    def continued(self, prompt: str, new: int) -> str:
        settings = SamplingParams(temperature=0, max_tokens=new)
        (result,) = self._engine.generate(prompt, settings, use_tqdm=False)
        return str(result.outputs[0].text)


if __name__ == "__main__":
    cases.run(VllmModel)
