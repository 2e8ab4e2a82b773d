"""The gradient of one step of transformers' Trainer, from what SGD at rate 1 changes."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 23,
    "max_position_embeddings": 64,
}


def step(
    rows: list[dict[str, Any]], accumulated: int, model_type: Any = LlamaForCausalLM
) -> tuple[float, torch.Tensor]:
    """The loss that is shown, and the gradient, of one step over all rows."""
    torch.manual_seed(0)
    model = model_type(LlamaConfig(**SIZES))
    before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=len(rows) // accumulated,
            gradient_accumulation_steps=accumulated,
            max_steps=1,
            learning_rate=1.0,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            optim="sgd",
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
        )
        done = Trainer(model=model, args=arguments, train_dataset=rows).train()
    after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    return done.training_loss, before - after
