"""The weight decay of DeepSpeed's AdamW that is given none, beside torch's."""

import inspect

import torch
from frame import load_deepspeed, verdict


def default_decay(optimizer: type) -> float:
    return inspect.signature(optimizer).parameters["weight_decay"].default


if __name__ == "__main__":
    load_deepspeed()
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam

    theirs = {kind.__name__: default_decay(kind) for kind in (FusedAdam, DeepSpeedCPUAdam)}
    right = default_decay(torch.optim.AdamW)
    figures = ", ".join(f"{name} {decay}" for name, decay in theirs.items())
    verdict(set(theirs.values()) != {right}, f"{figures}, torch's AdamW {right}")
