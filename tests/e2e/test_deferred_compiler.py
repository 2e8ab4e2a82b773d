"""The stand-in for torch's compiler, in a process that has not imported the compiler."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import torch
from megatron_ds.engine.deferred_compiler import defer_compiler

def step():
    optimizer.zero_grad()
    weight.square().backward()
    optimizer.step()

defer_compiler()
weight = torch.nn.Parameter(torch.tensor(2.0))
optimizer = torch.optim.AdamW([weight])
step()
assert "torch._dynamo.utils" not in sys.modules
graphs = []
def backend(graph, inputs):
    graphs.append(graph)
    return graph.forward

assert torch.compile(lambda x: 2 * x, backend=backend)(torch.ones(1)) == 2
assert len(graphs) == 1
assert sys.modules["torch._dynamo"] is torch._dynamo
assert torch._dynamo.__file__
step()
torch.compile(step, backend=backend)()
"""


def test_the_compiler_is_imported_when_something_is_compiled() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)
