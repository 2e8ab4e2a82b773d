"""A step over two equal rows, at once and as two micro-batches, of a model without loss options."""

import torch
from frame import verdict
from helpers import trainer
from transformers import LlamaForCausalLM


class OwnModel(LlamaForCausalLM):
    """As models are that do not take the number of tokens of the step."""

    def forward(self, input_ids=None, labels=None):
        return super().forward(input_ids=input_ids, labels=labels)


if __name__ == "__main__":
    tokens = torch.arange(1, 17)
    rows = [{"input_ids": tokens, "labels": tokens}] * 2
    (loss, gradient), (other, parted) = (trainer.step(rows, count, OwnModel) for count in (1, 2))
    ratio = (parted.norm() / gradient.norm()).item()
    figures = f"gradients {ratio:.3g} times those of one micro-batch"
    verdict(abs(ratio - 1) > 1e-3, f"{figures}; loss shown {other:.4f} instead of {loss:.4f}")
