"""Small random models of transformers, one of each family and of each kind of its parts."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.tables import tables

VOCAB = 50
TOKENS = torch.randint(0, VOCAB, (2, 12), generator=torch.Generator().manual_seed(1))
PROMPTS = [TOKENS[0, :11].tolist(), TOKENS[1, :3].tolist()]
"""Longer and shorter than the windows below."""
TABLES = tables(__file__)
MODELS: dict[str, tuple[str, dict[str, Any]]] = TABLES["models"]
"""Class and arguments of the configuration."""
LLAMA3 = TABLES["parts"]["llama3"]
YARN = TABLES["parts"]["yarn"]
EAGER = {"attn_implementation": "eager"}
"""Other kernels leave out the bound of Gemma 2's scores."""


def random_model(name: str, **changes: Any) -> Any:
    """A model whose parameters are all random, biases and norms included."""
    family, arguments = MODELS[name]
    config = getattr(transformers, family)(**arguments)
    config.update(changes)
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    randomize(model)
    return model


def randomize(model: Any) -> None:
    """Gives random values to all parameters of a model, and to the biases of its routers."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            is_norm = parameter.dim() == 1 and key.endswith("weight")
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator) + is_norm)
        for key, state in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                state.copy_(0.3 * torch.randn(state.shape, generator=generator))


def load_strictly(folder: Path, **options: Any) -> Any:
    """The model of a folder, whose files have exactly its weights."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True, **{**EAGER, **options}
        )
    assert not any(report.values()), report
    return model.eval()


def logits_of(model: Any, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(tokens).logits
    return found


def greedy_ids(model: Any, prompt: list[int], new: int) -> list[int]:
    """The ids that transformers appends to a prompt, whatever they are."""
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=new, **settings)[0]
    return [*ids[len(prompt) :].tolist()]
