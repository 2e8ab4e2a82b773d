"""Marks what an engine does while a step runs: passes, the optimizer's step, collectives, layers.

The marks are put around functions for the time of a context and leave nothing behind: neither the
model nor DeepSpeed has calls of timers or profilers. What a mark does is up to the caller, who
passes a function that opens a named region.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import deepspeed.comm
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor, nn
from torch.autograd import Variable

from megatron_ds.engine.deepspeed.patches import replaced
from megatron_ds.engine.device_batches import DeviceBatches
from megatron_ds.model.block import Block
from megatron_ds.parallel.mesh import Mesh

Open = Callable[[str], AbstractContextManager[object]]
"""Opens the region of a name. Regions of a thread are nested."""

BATCHES = "batch-generator"
FORWARD = "forward-compute"
"""Forward pass, by the name of Megatron's timer."""
BACKWARD = "backward-compute"
"""Backward pass, by the name of Megatron's timer."""
OPTIMIZER = "optimizer"
"""Step of the optimizer, by the name of Megatron's timer."""
PASSES = {"forward": FORWARD, "backward": BACKWARD, "step": OPTIMIZER}
"""Regions of the methods of DeepSpeed's engine."""
INSTRUCTIONS = {
    schedule.ForwardPass: FORWARD,
    schedule.BackwardPass: BACKWARD,
    schedule.OptimizerStep: OPTIMIZER,
    schedule.ReduceGrads: "all-grads-sync",
    schedule.ReduceTiedGrads: "embedding-grads-all-reduce",
    schedule.SendActivation: "forward-send",
    schedule.RecvActivation: "forward-recv",
    schedule.SendGrad: "backward-send",
    schedule.RecvGrad: "backward-recv",
    schedule.CommitP2P: "forward-backward-send-forward-backward-recv",
}
"""Regions of the instructions of a pipeline's schedule."""
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all_single",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "recv",
    "batch_isend_irecv",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
)
"""Functions of torch.distributed, through which DeepSpeed communicates, too. Not isend and irecv,
which are also values: torch compares the operations of a batch with them."""
CAPTURED = ("all_gather_function", "reduce_scatter_function")
"""Attributes of DeepSpeed's communication backend that are such functions."""


@contextmanager
def mark_passes(engine: Any, open_region: Open) -> Iterator[None]:
    """Marks reading of batches, passes and the optimizer's steps of a DeepSpeed engine."""
    with ExitStack() as stack:
        read = _marked(DeviceBatches.__next__, BATCHES, open_region)
        stack.enter_context(replaced(DeviceBatches, "__next__", read))
        if hasattr(engine, "_INSTRUCTION_MAP"):
            instructions = dict(engine._INSTRUCTION_MAP)
            for step in instructions.keys() & INSTRUCTIONS.keys():
                function = instructions[step]
                instructions[step] = _marked(function, INSTRUCTIONS[step], open_region)
            stack.enter_context(replaced(engine, "_INSTRUCTION_MAP", instructions))
        else:
            for name, region in PASSES.items():
                function = _marked(getattr(engine, name), region, open_region)
                stack.enter_context(replaced(engine, name, function))
        yield


@contextmanager
def mark_collectives(mesh: Mesh, open_region: Open) -> Iterator[None]:
    """Marks collectives by kind and axis of the mesh: `all_reduce[tp]`, `barrier[world]`.

    The region of a collective that runs alongside other work is its start; another one of the same
    name is the wait for it.
    """
    axes: dict[Any, str] = {}
    # Among groups with equal ranks, the first one names the collectives.
    for name, group in sorted(mesh.groups().items(), key=lambda item: item[1].size == 1):
        axes.setdefault(group.handle, name)
    axes.setdefault(dist.group.WORLD, "world")
    with ExitStack() as stack:
        for name in COLLECTIVES:
            function = _marked_collective(getattr(dist, name), axes, open_region)
            stack.enter_context(replaced(dist, name, function))
        backend = deepspeed.comm.comm.cdb
        for name in CAPTURED:
            if hasattr(backend, name):
                function = _marked_collective(getattr(backend, name), axes, open_region)
                stack.enter_context(replaced(backend, name, function))
        if (host_sum := mesh.tp.host_sum) is not None:
            function = _marked(host_sum.sum_, "all_reduce[tp]", open_region)
            stack.enter_context(replaced(host_sum, "sum_", function))
        yield


@contextmanager
def mark_layers(model: nn.Module, open_region: Open) -> Iterator[None]:
    """Marks embedding, layers, attention and MLP in them, final norm and output layer.

    In the backward pass, the region of a module begins with the gradient of its output and ends
    with the gradient of the previous module's output. No tensor is changed.
    """
    backward = _BackwardRegions(open_region)
    with ExitStack() as stack:
        stack.callback(backward.end)
        for module, names, region, depth in _regions_of(model):
            for name in names:
                marked = _marked(getattr(module, name), region, open_region)
                if name == names[-1]:
                    begin = functools.partial(backward.begin, f"{region} backward", depth)
                    marked = _with_gradient_hook(marked, begin)
                stack.enter_context(replaced(module, name, marked))
        yield


def _regions_of(model: nn.Module) -> Iterator[tuple[nn.Module, tuple[str, ...], str, int]]:
    """Modules, the methods that compute them in their order, regions, and depths."""
    for name, module in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(module, Block):
            yield module, ("forward",), f"layer {module.layer}", 0
            yield module.attention, ("project_gated", "attend", "output"), "attention", 1
            yield module.mlp, ("forward",), "MLP", 1
        elif last in ("embedding", "final_norm", "head"):
            yield module, ("forward",), last.replace("_", " "), 0


class _BackwardRegions:
    """The open regions of a backward pass, by depth."""

    def __init__(self, open_region: Open) -> None:
        self._open_region = open_region
        self._open: list[AbstractContextManager[object]] = []

    def begin(self, region: str, depth: int, _: Tensor) -> None:
        """Ends the regions of this depth and below, and begins one."""
        if not self._open:
            # In the thread of the pass, which on an accelerator is not its caller's.
            Variable._execution_engine.queue_callback(self.end)  # type: ignore[attr-defined]
        self.end(depth)
        context = self._open_region(region)
        context.__enter__()
        self._open.append(context)

    def end(self, depth: int = 0) -> None:
        while len(self._open) > depth:
            self._open.pop().__exit__(None, None, None)


def _with_gradient_hook(
    function: Callable[..., Any], hook: Callable[[Tensor], None]
) -> Callable[..., Any]:
    """Calls a hook with the gradient of what a function returns."""

    @functools.wraps(function)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        for value in output if isinstance(output, tuple) else (output,):
            if isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(hook)
        return output

    return hooked


def _marked(function: Callable[..., Any], region: str, open_region: Open) -> Callable[..., Any]:
    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        with open_region(region):
            return function(*args, **kwargs)

    return marked


def _marked_collective(
    function: Callable[..., Any], axes: dict[Any, str], open_region: Open
) -> Callable[..., Any]:
    operation = function.__name__
    parameters = list(inspect.signature(function).parameters)
    index = parameters.index("group") if "group" in parameters else None

    @functools.wraps(function)
    def marked(*args: Any, **kwargs: Any) -> Any:
        if index is None:
            group = args[0][0].group  # of the first of several transfers
        else:
            group = args[index] if len(args) > index else kwargs.get("group")
        region = f"{operation}[{axes.get(group or dist.group.WORLD, 'other')}]"
        with open_region(region):
            result = function(*args, **kwargs)
        return _Work(result, region, open_region) if isinstance(result, dist.Work) else result

    return marked


class _Work:
    """A started collective that marks its wait as a region."""

    def __init__(self, work: dist.Work, region: str, open_region: Open) -> None:
        self._work = work
        self._region = region
        self._open_region = open_region

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        with self._open_region(self._region):
            return self._work.wait(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)
