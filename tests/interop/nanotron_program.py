"""Trains a tiny Llama with nanotron's own model, optimizer and files, on the CPU.

    PYTHONPATH=build/trainers:. python tests/interop/nanotron_program.py SPEC.json

nanotron runs on GPUs only. What it imports of flash-attn, whose kernels need one, is computed by
torch here: attention of each sequence, the rotation of neighbors, and RMSNorm. Everything else is
nanotron's: the modules and their shards, the loss, AdamW by names, the schedule, and the functions
that write a checkpoint.

SPEC has `folder`, `tp`, `zero`, `steps` (the steps after which a checkpoint is written), `tokens`
(a file of numpy with the samples [N, S + 1] of all steps), `batch` (samples of a step) and
`settings` (fields of its LlamaConfig). Losses and logits are in FOLDER/results.npz.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import json
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

OPTIMIZER: dict[str, Any] = {
    "weight_decay": 0.1,
    "adam_eps": 1e-8,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
}
SCHEDULE: dict[str, Any] = {
    "learning_rate": 0.01,
    "lr_warmup_steps": 2,
    "lr_warmup_style": "linear",
    "lr_decay_style": "cosine",
    "lr_decay_steps": 8,
    "lr_decay_starting_step": None,
    "min_decay_lr": 0.001,
}


class OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU that are asked for on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, **options: Any) -> Tensor:
    """Causal attention of sequences that follow each other: q [T, N, D], k and v [T, K, D]."""
    assert options["causal"]
    ends = cu_seqlens_q.tolist()
    outputs = []
    for start, stop in itertools.pairwise(ends):
        heads = [x[start:stop].transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


class Rotary(nn.Module):
    """Rotation of neighboring dimensions of q [B, S, N, D], and of keys in kv [B, S, 2, K, D]."""

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False) -> None:
        super().__init__()
        assert interleaved
        self.frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)

    def forward(self, q: Tensor, kv: Tensor) -> tuple[Tensor, Tensor]:
        angles = torch.outer(torch.arange(q.shape[1], dtype=torch.float32), self.frequencies)
        cos = angles.cos()[:, None]
        sin = angles.sin()[:, None]

        def rotated(x: Tensor) -> Tensor:
            even = x[..., ::2]
            odd = x[..., 1::2]
            return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)

        return rotated(q), torch.stack([rotated(kv[:, :, 0]), kv[:, :, 1]], 2)


def norm(x: Tensor, weight: Tensor, bias: None, eps: float = 1e-6, **options: Any) -> Tensor:
    """RMSNorm."""
    assert options["is_rms_norm"]
    return F.rms_norm(x, weight.shape, weight, eps)


def provide(name: str, **members: Any) -> None:
    """Puts a module where nanotron imports a package that needs a GPU."""
    module = ModuleType(name)
    module.__dict__.update(members)
    sys.modules[name] = module


def prepare() -> None:
    """Everything that nanotron needs instead of a GPU."""
    provide("flash_attn", bert_padding=None)
    provide("flash_attn.bert_padding")
    provide("flash_attn.layers")
    provide("flash_attn.layers.rotary", RotaryEmbedding=Rotary)
    provide("flash_attn.ops")
    provide("flash_attn.ops.triton")
    provide("flash_attn.ops.triton.layer_norm", layer_norm_fn=norm)
    provide(
        "flash_attn.flash_attn_interface",
        flash_attn_varlen_func=attention,
        flash_attn_with_kvcache=None,
    )
    try:
        from functorch.dim import tree_map
    except ImportError:
        from torch.utils._pytree import tree_map

        provide("functorch.dim", tree_map=tree_map)
    break_circle()
    from nanotron.parallel import ParallelContext

    ParallelContext.set_device = lambda self: None


def break_circle() -> None:
    """Imports nanotron.logging, which in 0.4 no order of imports can: it and nanotron.config import
    each other, it only for an annotation."""
    spec = importlib.util.find_spec("nanotron.logging")
    assert spec is not None
    assert spec.origin is not None
    text = Path(spec.origin).read_text()
    line = "from nanotron.config.config import LoggingArgs\n"
    assert line in text
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    exec(
        compile(text.replace(line, "LoggingArgs = object\n"), spec.origin, "exec"), module.__dict__
    )
    sys.modules["nanotron"].logging = module


def build(spec: dict[str, Any], context: Any) -> tuple[Any, Any, Any]:
    """The model with random weights, its optimizer and the schedule."""
    from nanotron.config import LlamaConfig, ParallelismArgs
    from nanotron.config.config import LRSchedulerArgs, OptimizerArgs
    from nanotron.helpers import init_optimizer_and_grad_accumulator, lr_scheduler_builder
    from nanotron.models.base import build_model
    from nanotron.models.llama import LlamaForTraining
    from nanotron.trainer import mark_tied_parameters

    parallel = ParallelismArgs(dp=context.dp_pg.size(), pp=1, tp=spec["tp"])
    config = LlamaConfig(**spec["settings"])
    model = build_model(
        lambda: LlamaForTraining(config, context, parallel), context, torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    mark_tied_parameters(model=model, parallel_context=context, parallel_config=parallel)
    shared = SimpleNamespace(init_method=SimpleNamespace(std=0.3), model_config=config)
    torch.manual_seed(dist.get_rank(context.tp_pg))
    model.init_model_randomly(config=SimpleNamespace(model=shared))
    with torch.no_grad():  # norms differ from one, the same on all ranks
        generator = torch.Generator().manual_seed(5)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    rates = LRSchedulerArgs(**SCHEDULE)
    args = OptimizerArgs(
        zero_stage=spec["zero"],
        clip_grad=None,
        accumulate_grad_in_fp32=False,
        torch_adam_is_fused=False,
        learning_rate_scheduler=rates,
        **OPTIMIZER,
    )
    optimizer, _ = init_optimizer_and_grad_accumulator(model, args, context)
    return model, optimizer, lr_scheduler_builder(optimizer, rates, 10)


def write(folder: Path, step: int, spec: dict[str, Any], parts: Any, context: Any) -> None:
    """A checkpoint, by the functions that nanotron's trainer calls."""
    from nanotron.serialize import save_lr_scheduler, save_optimizer, save_weights
    from nanotron.serialize.metadata import save_meta

    model, optimizer, scheduler = parts
    root = folder / str(step)
    root.mkdir(exist_ok=True, parents=True)
    save_weights(model=model, parallel_context=context, root_folder=root)
    save_optimizer(optimizer=optimizer, parallel_context=context, root_folder=root)
    save_lr_scheduler(lr_scheduler=scheduler, parallel_context=context, root_folder=root)
    metas = {"last_train_step": step, "consumed_train_samples": step * spec["batch"]}
    save_meta(root_folder=root, parallel_context=context, checkpoint_metadata=metas)
    if dist.get_rank() == 0:
        config = dataclasses.asdict(model.config)
        (root / "model_config.json").write_text(json.dumps(config))
        (folder / "latest.txt").write_text(str(step))
    dist.barrier()


def logits_of(model: Any, tokens: Tensor, context: Any) -> Tensor:
    """Logits [B, S, V] of all ranks' shards."""
    with torch.no_grad():
        local = model.model(input_ids=tokens, input_mask=torch.ones_like(tokens, dtype=torch.bool))
    shards = [torch.empty_like(local) for _ in range(context.tp_pg.size())]
    dist.all_gather(shards, local.contiguous(), group=context.tp_pg)
    return torch.cat(shards, -1).transpose(0, 1)


def run(rank: int, world: int, spec: dict[str, Any], store: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with OnCpu():
        prepare()
        from nanotron.parallel import ParallelContext

        context = ParallelContext(spec["tp"], 1, world // spec["tp"])
        parts = build(spec, context)
        model, optimizer, scheduler = parts
        folder = Path(spec["folder"])
        samples = torch.from_numpy(numpy.load(spec["tokens"])).long()
        size = spec["batch"]
        losses = []
        if 0 in spec["steps"]:
            write(folder, 0, spec, parts, context)
        for step in range(max(spec["steps"])):
            batch = samples[step * size : (step + 1) * size]
            replicas = context.dp_pg.size()
            own = batch[dist.get_rank(context.dp_pg) :: replicas]
            mask = torch.ones_like(own[:, 1:], dtype=torch.bool)
            loss = model(
                input_ids=own[:, :-1], input_mask=mask, label_ids=own[:, 1:], label_mask=mask
            )["loss"]
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad, group=context.dp_pg)
                parameter.grad /= replicas
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            total = loss.detach().clone()
            dist.all_reduce(total, group=context.dp_pg)
            losses.append(float(total) / replicas)
            if step + 1 in spec["steps"]:
                write(folder, step + 1, spec, parts, context)
        logits = logits_of(model, samples[:2, :-1], context)
        if rank == 0:
            numpy.savez(folder / "results.npz", losses=losses, logits=logits)
    dist.destroy_process_group()


def main() -> int:
    spec = json.loads(Path(sys.argv[1]).read_text())
    world = spec["tp"] * spec.get("dp", 1)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as store:
        ranks = [
            context.Process(target=run, args=(rank, world, spec, f"{store}/store"))
            for rank in range(world)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
