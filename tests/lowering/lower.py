"""Compiles parts of a training step to machine code of an H100, on a machine without a device.

    PYTHONPATH=build/lowering:. python tests/lowering/lower.py kernels.json

Needs torch's build for CUDA, no driver. Inductor is told of a device that is not there, and given
tensors without values; its Triton kernels are compiled with all the configurations that it would
try. Writes a JSON object: by function, forward and backward, the number of kernels, and the largest
numbers of registers and spilled bytes of any of their configurations, and the calls of libraries
and collectives.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
import triton
from torch import Tensor, nn
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor import config as inductor
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes.joint_graph import joint_graph_passes
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers
from torch._inductor.virtualized import V
from torch._prims import TensorMeta
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import traceable_collective_remaps
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from triton.backends.compiler import GPUTarget

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.engine.optimizers.stochasticadamw import update
from megatron_ds.model.block import COMBINED, Block
from megatron_ds.model.declaration.experts import ExpertsSpec
from megatron_ds.model.experts.grouped import Experts
from megatron_ds.model.kernels import elementwise
from megatron_ds.model.kernels.elementwise import Elementwise, activate, add_dropout
from megatron_ds.model.mlp import MLP
from megatron_ds.model.position_embedding import AttentionContext, Rotation, rope_table, rotate
from megatron_ds.model.weight_init import Initializer
from megatron_ds.parallel.fp8 import grouped, rounding
from megatron_ds.parallel.fp8.casts import EAGER_PARTS, PartCasts
from megatron_ds.parallel.fp8.grouped import Fp8Experts, Parts
from megatron_ds.parallel.fp8.linear import BOTH, Fp8Linear, Fp8Recipe
from megatron_ds.parallel.fp8.rounding import (
    E4M3,
    E5M2,
    Rounded,
    cast,
    largest_values,
    round_along,
)
from megatron_ds.parallel.fused_linear_cross_entropy import chunk_rows, fusible_softmax_, multiply
from megatron_ds.parallel.linear import ColumnParallelLinear, RowParallelLinear
from megatron_ds.parallel.mesh import Group, Mesh
from megatron_ds.parallel.rng import RngStreams

TRACED = Elementwise(activate=activate)
"""The functions of graphs; eager layers have an activation of their own."""
DEVICE = "cuda"
HOST = torch.device("cpu")
CAPABILITY = (9, 0)
H100 = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    total_memory=80 * 2**30,
    multi_processor_count=132,
    warp_size=32,
    regs_per_multiprocessor=2**16,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    shared_memory_per_block=48 * 2**10,
    shared_memory_per_block_optin=227 * 2**10,
    shared_memory_per_multiprocessor=228 * 2**10,
    L2_cache_size=50 * 2**20,
    gcnArchName="",
)
S = 1024
"""Tokens of a sample."""
FP8_RECIPES = (("tensorwise", False, None), ("rowwise", True, None), ("blockwise", False, 128))
EXPERTS = 8
B = 8
"""Samples of a micro-batch."""
GPT2 = ModelConfig(
    num_layers=12, hidden_size=768, num_attention_heads=12, seq_length=S, vocab_size=50304,
    attention_dropout=0.0, hidden_dropout=0.0,
)  # fmt: skip
LLAMA = ModelConfig(
    num_layers=16, hidden_size=2048, num_attention_heads=16, num_query_groups=4, seq_length=S,
    vocab_size=128256, attention_dropout=0.0, hidden_dropout=0.0, normalization="RMSNorm",
    position_embedding_type="rope", activation="swiglu", add_bias_linear=False,
    ffn_hidden_size=5632,
)  # fmt: skip


class Driver:
    """What Triton asks a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget(DEVICE, 10 * CAPABILITY[0] + CAPABILITY[1], 32)

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device(DEVICE, 0)


def pretend(stack: ExitStack) -> None:
    """Lets torch and Triton see a device."""
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": False,
        "get_rng_state": torch.empty(0),
        "set_rng_state": None,
        "device_count": 1,
        "current_device": 0,
        "set_device": None,
        "get_device_properties": H100,
        "get_device_capability": CAPABILITY,
        "_lazy_init": None,
        "synchronize": None,
    }
    for name, answer in answers.items():
        stack.enter_context(mock.patch.object(torch.cuda, name, return_value=answer))
    of_interface = {
        "get_device_properties": H100,
        "current_device": 0,
        "is_available": True,
        "is_triton_capable": True,
        "get_compute_capability": 90,
        "raise_if_triton_unavailable": None,
    }
    for owner in (CudaInterface, CudaInterface.Worker):
        for name, answer in of_interface.items():
            if hasattr(owner, name):
                fake = staticmethod(lambda *_, answer=answer, **__: answer)
                stack.enter_context(mock.patch.object(owner, name, fake))
    # An index of a tensor of the device asks the driver, too.
    seed = torch.ops.prims.inductor_lookup_seed.default
    stack.enter_context(mock.patch.object(seed, "prim_meta_impl", _seed_like))
    context = "torch._subclasses.fake_tensor.init_gpu_context"
    stack.enter_context(mock.patch(context, return_value=None))
    # Otherwise the backward pass is compiled when it runs.
    stack.enter_context(functorch.patch(force_non_lazy_backward_lowering=True))
    # Its kernels keep no assembly.
    stack.enter_context(mock.patch.object(inductor, "use_static_cuda_launcher", False))
    stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
    triton.runtime.driver.set_active(Driver())


def _seed_like(seeds: Tensor, index: int) -> Any:
    return TensorMeta(shape=(), strides=(), dtype=seeds.dtype, device=seeds.device)


class Lowering:
    """Compiles functions, and keeps what their kernels need."""

    def __init__(self, mode: FakeTensorMode, folder: Path) -> None:
        self._mode = mode
        self._folder = folder
        self.counts_launches = False  # of kernels, each of which may be launched several times
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, name: str, function: Callable[..., Any], *inputs: Tensor) -> None:
        """Lower a function and, where an input needs a gradient, its backward pass.

        It is traced on the host, since autograd asks the driver of a device for its streams, and
        moved to the device before Inductor's passes.
        """

        def partition(graph: GraphModule, joint: Any, **options: Any) -> Any:
            on_device = joint_graph_passes(self._on_device(graph, joint), input_device=HOST)
            return min_cut_rematerialization_partition(
                on_device, joint, compiler="inductor", **options
            )

        def lower(direction: str, graph: GraphModule, examples: list[Tensor]) -> Any:
            if direction == "inference":
                graph = joint_graph_passes(self._on_device(graph, examples), input_device=HOST)
            label = name if direction == "inference" else f"{name}, {direction}"
            self.results[label] = self._measure(graph, is_inference=direction == "inference")
            return make_boxed_func(graph)

        class Function(nn.Module):
            def forward(self, *flat: Tensor) -> Any:
                outputs = function(*flat)
                return outputs if isinstance(outputs, tuple) else (outputs,)

        aot_module_simplified(
            Function(),
            inputs,
            fw_compiler=functools.partial(lower, "forward"),
            bw_compiler=functools.partial(lower, "backward"),
            inference_compiler=functools.partial(lower, "inference"),
            partition_fn=partition,
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )

    def _on_device(self, graph: GraphModule, examples: Any) -> GraphModule:
        """A graph whose tensors are on the device."""

        def on_device(value: Any) -> Any:
            return torch.device(DEVICE) if isinstance(value, torch.device) else value

        for node in graph.graph.nodes:
            node.args = map_aggregate(node.args, on_device)
            node.kwargs = map_aggregate(node.kwargs, on_device)
        graph.recompile()
        with self._mode:
            moved = tree_map_only(Tensor, _like_on_device, examples)
        FakeTensorProp(graph, self._mode).propagate(*tree_leaves(moved))
        return graph

    def _measure(self, graph: GraphModule, *, is_inference: bool) -> dict[str, Any]:
        inputs = [node.meta["val"] for node in graph.graph.nodes if node.op == "placeholder"]
        with V.set_debug_handler(DebugContext()):
            view_to_reshape(graph)
            FakeTensorProp(graph, self._mode).propagate(*inputs)
            post_grad_passes(graph, is_inference)
            lowering = GraphLowering(graph, is_inference=is_inference)
            with V.set_graph_handler(lowering):
                lowering.run(*inputs)
                code = lowering.codegen()[0]
        text = str(getattr(code, "value", code))
        kernels = re.findall(r"async_compile\.triton\('(\w+)', '''(.*?)'''", text, re.DOTALL)
        used = [pair for kernel in kernels for pair in self._compile(*kernel)]
        calls = re.findall(r"(?:extern_kernels|torch\.ops\.aten)\.(\w+)[.\w]*\(", text)
        collectives = re.findall(r"torch\.ops\._c10d_functional\.(\w+)[.\w]*\(", text)
        launches = sum(text.count(f"{name}.run(") for name, _ in kernels)
        return {
            "kernels": len(kernels),
            **({"launches": launches} if self.counts_launches else {}),
            "registers": max((registers for registers, _ in used), default=0),
            "spilled bytes": max((spilled for _, spilled in used), default=0),
            "calls of libraries": dict(sorted(Counter(calls).items())),
            "collectives": dict(sorted(Counter(collectives).items())),
        }

    def _compile(self, name: str, source: str) -> Iterator[tuple[int, int]]:
        """Registers and spilled bytes of a kernel, for each of its configurations."""
        path = self._folder / f"{name}_{len(self.results)}.py"
        path.write_text(source, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        kernel = getattr(module, name)
        kernel.precompile(warm_cache_only=True)
        for result in kernel.compile_results:
            yield self._assemble(result.kernel.asm["ptx"])

    def _assemble(self, ptx: str) -> tuple[int, int]:
        (self._folder / "kernel.ptx").write_text(ptx, encoding="utf-8")
        ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
        command = [str(ptxas), "--verbose", "--gpu-name=sm_90a", "kernel.ptx", "-o", "kernel.cubin"]
        done = subprocess.run(command, cwd=self._folder, capture_output=True, text=True, check=True)
        registers = re.search(r"Used (\d+) registers", done.stderr)
        spills = re.findall(r"(\d+) bytes spill", done.stderr)
        assert registers is not None
        return int(registers[1]), sum(map(int, spills))


def _like_on_device(x: Tensor) -> Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=DEVICE)


class CuDNN:
    """The attention core of complete samples on a device, without asking it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        attended: Tensor = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, dropout, True
        )[0]
        return attended


class Part(nn.Module):
    """A segment of a layer that is a graph of its own."""

    def __init__(self, block: Block, name: str) -> None:
        super().__init__()
        self.block = block
        self._name = name

    def forward(self, *inputs: Any) -> Any:
        return getattr(self.block, self._name)(*inputs)


@contextmanager
def traced_collectives() -> Iterator[None]:
    """Collectives are operations of the graph, as torch.compile makes them."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch("torch.compiler.is_compiling", return_value=True))
        for eager, traced in traceable_collective_remaps.items():
            if getattr(dist, eager.__name__, None) is eager:
                stack.enter_context(mock.patch.object(dist, eager.__name__, traced))
        yield


def build_block(config: ModelConfig, mesh: Mesh) -> Block:
    init = Initializer(None)
    block = Block(
        config,
        0,
        group=mesh.tp,
        rng=RngStreams(0, HOST),
        init=init,
        mlp=MLP(config, 0, group=mesh.tp, init=init),
        checkpoint_core=None,
    )
    block.use_elementwise(TRACED)
    return block


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=grad)


def lower_segments(
    lowering: Lowering, name: str, config: ModelConfig, block: Block, table: tuple[Tensor, ...]
) -> None:
    """Lower the graphs before and after the attention core of ranks that share sequences."""
    weights = {f"block.{key}": empty(*each.shape) for key, each in block.named_parameters()}
    stream = S, B, config.hidden_size

    def run(label: str, segment: str, *inputs: Tensor) -> None:
        part = Part(block, segment)
        keys = tuple(weights)

        def function(*flat: Tensor) -> Any:
            values = dict(zip(keys, flat, strict=False))
            others = flat[len(keys) :]
            if segment == "_before":
                x, *tables = others
                outputs = torch.func.functional_call(
                    part, values, (x, Rotation(*tables) if tables else None)
                )
                return tuple(output for output in outputs if output is not None)
            return torch.func.functional_call(part, values, (*others, None, None))

        lowering.run(f"{name}: {label} attention", function, *weights.values(), *inputs)

    run("before", "_before", empty(*stream), *table)
    heads = config.num_attention_heads
    run("after", "_after", empty(*stream), empty(B, heads, S, config.head_dim))


def layer_of(block: Block, names: tuple[str, ...], tables: int) -> Callable[..., Tensor]:
    """A layer as a function of its input, its weights by name, tables of rotations, and of codes
    and scales of its weights and their transposed ones, if it multiplies in fp8."""
    products = [
        module.training_product
        for module in block.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
        if isinstance(module.training_product, Fp8Linear)
    ]

    def layer(x: Tensor, *rest: Tensor) -> Tensor:
        values = dict(zip(names, rest, strict=False))
        table = rest[len(names) : len(names) + tables]
        codes = iter(rest[len(names) + tables :])
        for product in products:
            by_input, by_output = (
                Rounded(next(codes), next(codes), product.block_of_weights) for _ in range(2)
            )
            product.rounded = by_input, by_output
        context = AttentionContext(Rotation(*table) if table else None, CuDNN())
        y: Tensor = torch.func.functional_call(block, values, (x, context))
        return y

    return layer


def lower_all(lowering: Lowering, blocks: dict[str, Block], sharded: dict[str, Block]) -> None:
    for config, name in ((GPT2, "124M"), (LLAMA, "Llama-like 1B")):
        block = blocks[name]
        vocab = config.padded_vocab(1)
        rows = chunk_rows(S * B, vocab, 2, on_host=False)
        logits = empty(rows, vocab, grad=False)
        lowering.run(f"{name}: softmax of the loss", fusible_softmax_, logits)
        gradient = empty(S * B, config.hidden_size, grad=False)
        factor = empty(dtype=torch.float32, grad=False)
        lowering.run(f"{name}: gradient of the loss", multiply, gradient, factor)
        width = config.mlp_hidden_size * (2 if config.is_gated else 1)
        kind = functools.partial(activate, activation=config.activation, gelu_kind=config.gelu_kind)
        lowering.run(f"{name}: {config.activation}", kind, empty(S, B, width))
        stream = S, B, config.hidden_size
        added = functools.partial(add_dropout, probability=0.1, group=block.group)
        lowering.run(f"{name}: dropout and addition", added, empty(*stream), empty(*stream))
        table: tuple[Tensor, ...] = ()
        if block.rule.rope is not None:
            table = rope_table(S, block.rule.rope, HOST)[:2]
            heads = config.num_attention_heads + config.kv_heads
            x = empty(S, B, heads, config.head_dim)
            lowering.run(
                f"{name}: rotation", lambda x, *table: rotate(x, Rotation(*table)), x, *table
            )
        weights = {key: empty(*each.shape) for key, each in block.named_parameters()}

        layer = layer_of(block, tuple(weights), len(table))
        lowering.counts_launches = config is LLAMA  # next to its layers in fp8
        lowering.run(f"{name}: layer", layer, empty(*stream), *weights.values(), *table)
        lowering.counts_launches = False
        lower_segments(lowering, name, config, block, table)
        weights = {key: empty(*each.shape) for key, each in sharded[name].named_parameters()}
        with traced_collectives():
            lowering.run(
                f"{name}: layer of 2 tensor-parallel ranks",
                layer_of(sharded[name], tuple(weights), len(table)),
                empty(*stream),
                *weights.values(),
                *table,
            )


def lower_fp8_layers(lowering: Lowering, name: str, config: ModelConfig, mesh: Mesh) -> None:
    """Lower compiled layers whose linear layers multiply in fp8, with weights that are rounded."""
    block = build_block(config, mesh)
    linear = [
        module
        for module in block.modules()
        if isinstance(module, (ColumnParallelLinear, RowParallelLinear))
    ]
    weights = {key: empty(*each.shape) for key, each in block.named_parameters()}
    table = () if block.rule.rope is None else rope_table(S, block.rule.rope, HOST)[:2]
    for recipe, by_row, side in FP8_RECIPES:
        rule = Fp8Recipe(E5M2, by_row, mesh.sequence, block=side)
        for module in linear:
            module.training_product = Fp8Linear(rule, module.group, module.sharded_dim)
        rounded: list[Tensor] = []
        for rows, columns in (module.weight.shape for module in linear):
            for shape in ((rows, columns), (columns, rows)):
                scales = (shape[0], 1) if by_row else ()
                if side is not None:
                    scales = shape[0] // side, shape[1] // side
                rounded.append(empty(*shape, dtype=E4M3, grad=False))
                rounded.append(empty(*scales, dtype=torch.float32, grad=False))
        inputs = empty(S, B, config.hidden_size), *weights.values(), *table, *rounded
        layer = layer_of(block, tuple(weights), len(table))
        lowering.counts_launches = True
        with inductor.patch(joint_graph_constant_folding=False, **COMBINED):
            lowering.run(f"{name}: layer in fp8 {recipe}", layer, *inputs)
        lowering.counts_launches = False


def lower_rounding(lowering: Lowering) -> None:
    """Lower the casts of linear layers in fp8 and of experts that are functions of their own."""
    size = LLAMA.hidden_size

    def run(name: str, function: Callable[..., Any], *numbers: Tensor) -> None:
        # Folding computes the constant on the device.
        with inductor.patch(joint_graph_constant_folding=False, **COMBINED):
            lowering.run(f"fp8 {name}", function, *numbers)

    for name, by_row, side in FP8_RECIPES:
        rows = None if side is None else (1, side)
        square = None if side is None else (side, side)
        matrices = {"weights": empty(size, size, grad=False)}
        if side is None:
            matrices["weights of experts"] = empty(EXPERTS, size, size, grad=False)
        numbers = empty(S * B, size, grad=False)
        for label, dtype in (("activations", E4M3), ("gradients", E5M2)):
            options = {"dims": BOTH, "dtype": dtype, "by_row": by_row, "block": rows}
            run(f"{name}: {label}", functools.partial(round_along, **options), numbers)
        for label, weight in matrices.items():
            ways = {"": BOTH, ", forward": (-1,), ", backward": (-2,)}
            for way, dims in ways.items():
                options = {"dims": dims, "dtype": E4M3, "by_row": by_row, "block": square}
                run(f"{name}: {label}{way}", functools.partial(round_along, **options), weight)
        if side is not None:
            continue
        for label, weight in {"activations": numbers, **matrices}.items():
            shared = f"{name}: {label} of 2 tensor-parallel ranks"
            measured = functools.partial(largest_values, dims=BOTH, by_row=by_row)
            run(f"{shared}, largest values", measured, weight)
            sizes = [amax.shape for amax in largest_values(weight, BOTH, by_row)]
            largest = [empty(*shape, dtype=torch.float32, grad=False) for shape in sizes]
            run(shared, lambda x, *largest: cast(x, largest, BOTH, E4M3), weight, *largest)


class Launches(TorchDispatchMode):
    """Counts the kernels of eager operations, and keeps calls of functions that are compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = 0
        self.calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._is_compiled = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function._schema.name
        is_kernel = not name.startswith(("prim", "c10d", "aten::empty", "aten::detach"))
        if is_kernel and not function.is_view and not self._is_compiled:
            self.kernels += 1
        return function(*args, **(kwargs or {}))

    def compiled(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            self.calls.append((function, arguments))
            self._is_compiled = True
            results = function(*arguments)
            self._is_compiled = False
            return results

        return run


def lower_experts(lowering: Lowering, name: str, experts: Experts, recipe: str) -> None:
    """Lower the casts of experts, and count what they launch next to the kernels of libraries.

    Their layer is no graph. Weights are rounded before.
    """
    weights = {key: empty(*each.shape) for key, each in experts.named_parameters()}
    launches = Launches()
    layers = (experts.fc_in, 1), (experts.fc_out, 2)
    experts.training_parts = None
    for layer, sharded in layers:
        layer.multiply = lambda a, b, ends: F.grouped_mm(a, b, offs=ends)
        layer.training_product = None
        if recipe == "bf16":
            continue
        by_row = recipe == "rowwise"
        rule = Fp8Recipe(E4M3, by_row, Group((0,), 0, None))
        functions = vars(EAGER_PARTS).items()
        rule.part_casts = PartCasts(**{key: launches.compiled(cast) for key, cast in functions})
        product = Fp8Experts(rule, experts.group, sharded)
        _, outputs, inputs = weights[f"{'fc_in' if sharded == 1 else 'fc_out'}.weight"].shape
        rounded = {
            dim: Rounded(
                empty(EXPERTS, *shape, dtype=E4M3, grad=False),
                empty(EXPERTS, shape[0], 1, dtype=torch.float32, grad=False),
            )
            for dim, shape in ((2, (outputs, inputs)), (1, (inputs, outputs)))
        }
        product.round_weight = lambda weight, dim, rounded=rounded: rounded[dim]  # type: ignore[method-assign]
        layer.training_product = product
        experts.training_parts = functools.partial(Parts.of, rule)
    x = empty(S * B, LLAMA.hidden_size)
    counts = torch.empty(EXPERTS, dtype=torch.int64)
    directions = []
    with launches:
        y = torch.func.functional_call(experts, weights, (x, counts))
        directions.append(("forward", launches.kernels, launches.calls))
        launches.kernels = 0
        launches.calls = []
        torch.autograd.grad(y, (x, *weights.values()), torch.empty_like(y))
        directions.append(("backward", launches.kernels, launches.calls))
    lowering.counts_launches = True
    for direction, kernels, calls in directions:
        label = f"Llama-like 1B: {name} in {recipe}, {direction}"
        used = [_lower_call(lowering, label, *call) for call in calls]
        lowering.results[label] = {
            "kernels": sum(one["kernels"] for one in used),
            "launches": kernels + sum(one["launches"] for one in used),
            "registers": max((one["registers"] for one in used), default=0),
            "spilled bytes": max((one["spilled bytes"] for one in used), default=0),
            "calls of libraries": {},
            "collectives": {},
        }
    lowering.counts_launches = False


def _lower_call(
    lowering: Lowering, label: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> dict[str, Any]:
    """Lower a function of tensors and other arguments."""
    tensors = [value.detach() for value in arguments if isinstance(value, Tensor)]

    def of_tensors(*flat: Tensor) -> Any:
        values = iter(flat)
        return function(
            *(next(values) if isinstance(value, Tensor) else value for value in arguments)
        )

    with inductor.patch(joint_graph_constant_folding=False, **COMBINED):
        lowering.run(label, of_tensors, *tensors)
    return lowering.results.pop(label)


def lower_step(lowering: Lowering) -> None:
    """Lower the optimizer's step of weights that are rounded stochastically."""
    for name, shape in (("one row", (1, 2**21)), ("rows of a shard", (4096, 512))):
        tensors = [empty(*shape, dtype=torch.int32, grad=False) for _ in range(4)]  # pairs of bf16
        location = empty(3, dtype=torch.int32, grad=False)
        settings = empty(8, dtype=torch.float32, grad=False)
        with inductor.patch(joint_graph_constant_folding=False):
            step = f"AdamW in bf16: {name}"
            lowering.run(step, lambda *inputs: update(*inputs), *tensors, location, settings)


def main() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    configs = {"124M": GPT2, "Llama-like 1B": LLAMA}
    single = Mesh.single()
    blocks = {name: build_block(config, single) for name, config in configs.items()}
    mesh = Mesh.build(2)
    sharded = {name: build_block(config, mesh) for name, config in configs.items()}
    spec = ExpertsSpec(LLAMA, MoEConfig((EXPERTS,), moe_ffn_hidden_size=1408))
    experts = {
        name: Experts(spec, "layers.0.mlp", ranks, Initializer(None)).bfloat16()
        for name, ranks in (
            ("layer of experts", single),
            ("layer of experts of 2 tensor-parallel ranks", mesh),
        )
    }
    for layers in experts.values():
        layers.elementwise = TRACED
    with ExitStack() as stack:
        pretend(stack)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        mode = stack.enter_context(FakeTensorMode())
        stack.enter_context(V.set_fake_mode(mode))
        lowering = Lowering(mode, folder)
        stack.enter_context(mock.patch.object(rounding, "has_kernel", return_value=True))
        # What is traced on the host is for the device.
        stack.enter_context(mock.patch.object(elementwise, "is_host", return_value=False))
        lower_rounding(lowering)
        kernel = mock.patch.object(grouped, "has_grouped_kernel", return_value=True)
        stack.enter_context(kernel)
        for name, layers in experts.items():
            for recipe in ("bf16", "tensorwise", "rowwise"):
                lower_experts(lowering, name, layers, recipe)
        lower_fp8_layers(lowering, "Llama-like 1B", LLAMA, single)
        lower_step(lowering)
        lower_all(lowering, blocks, sharded)
    Path(sys.argv[1]).write_text(json.dumps(lowering.results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
