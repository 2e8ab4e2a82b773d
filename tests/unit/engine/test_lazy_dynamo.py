"""Training that compiles nothing does not import torch's compiler."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
import torch
import megatron_ds.training.process
from deepspeed.runtime.activation_checkpointing import checkpointing
from megatron_ds.engine.deepspeed.lazy_dynamo import DISABLED, import_dynamo_when_compiling

def train(optimizer_class, **options):
    weight = torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))
    optimizer = optimizer_class([weight], lr=0.1, **options)
    for _ in range(3):
        weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.load_state_dict(optimizer.state_dict())
    assert not weight.isnan().any()
    return weight.detach()

cases = [(torch.optim.AdamW, {}), (torch.optim.Adam, {}), (torch.optim.SGD, {"momentum": 0.9})]
import_dynamo_when_compiling()
import_dynamo_when_compiling()  # once more changes nothing
direct = [train(case, **options) for case, options in cases]
function = torch.optim.Optimizer.zero_grad.__wrapped__
assert "torch._dynamo" not in sys.modules, "the compiler was imported"
assert checkpointing.CheckpointFunction is not None

import torch._dynamo
excluded = [train(case, **options) for case, options in cases]
assert all(map(torch.equal, direct, excluded)), (direct, excluded)
assert getattr(function, DISABLED).__module__ == "torch._dynamo.eval_frame", "is not excluded"
print("done")
"""


def test_optimizers_step_without_the_compiler_and_equal_their_steps_with_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("done\n")
