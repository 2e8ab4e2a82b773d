"""A run of nanotron on the CPU: python nanotron_run.py SAMPLES FOLDER STEPS [OPTIONS | mistakes]

nanotron runs on GPUs only. What it imports of flash-attn, whose kernels need one, is computed by
torch here: attention of each sequence, the rotation of neighbors, and RMSNorm. Everything else is
nanotron's: the modules and their shards, the loss, clipping, AdamW by names, the schedule, and the
functions that write a checkpoint. The initial weights are the same in every layout.

OPTIONS is JSON with `tp`, `dp`, `zero` and fields of nanotron's LlamaConfig as `model`. The last
logits and their tokens are in FOLDER/reference.npz.
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
import zlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from on_cpu import OnCpu
from torch import Tensor, nn
from trainer_mistakes import Mistakes

MODEL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "max_position_embeddings": 16,
    "rms_norm_eps": 1e-5,
}
BATCH = 4
MICRO_BATCH = 2
SAVED = 3
"""Steps between checkpoints; with mistakes, each step has one."""
MISTAKEN = (
    "model.decoder.1.pp_block.mlp.gate_up_proj.weight",
    "model.decoder.0.pp_block.mlp.down_proj.weight",
    "model.decoder.0.pp_block.attn.o_proj.weight",
)
CLIP = 0.1
OPTIMIZER: dict[str, Any] = {
    "zero_stage": 0,
    "weight_decay": 0.1,
    "clip_grad": CLIP,
    "accumulate_grad_in_fp32": False,
    "adam_eps": 1e-8,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "torch_adam_is_fused": False,
}
SCHEDULE: dict[str, Any] = {
    "learning_rate": 3e-3,
    "lr_warmup_steps": 2,
    "lr_warmup_style": "linear",
    "lr_decay_style": "cosine",
    "lr_decay_steps": 18,
    "lr_decay_starting_step": None,
    "min_decay_lr": 3e-4,
}


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


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the run is distributed, and its model."""

    tp: int = 1
    dp: int = 1
    zero: int = 0
    model: dict[str, Any] = dataclasses.field(default_factory=dict)
    has_mistakes: bool = False


def build(layout: Layout, context: Any) -> tuple[Any, Any, Any]:
    """The model with random weights, its optimizer and the schedule."""
    from nanotron.config import LlamaConfig, ParallelismArgs
    from nanotron.config.config import LRSchedulerArgs, OptimizerArgs
    from nanotron.helpers import init_optimizer_and_grad_accumulator, lr_scheduler_builder
    from nanotron.models.base import build_model
    from nanotron.models.llama import LlamaForTraining
    from nanotron.trainer import mark_tied_parameters

    parallel = ParallelismArgs(dp=layout.dp, pp=1, tp=layout.tp)
    config = LlamaConfig(**{**MODEL, **layout.model})
    model = build_model(
        lambda: LlamaForTraining(config, context, parallel),
        context,
        torch.float32,
        device=torch.device("cpu"),
    )
    mark_tied_parameters(model=model, parallel_context=context, parallel_config=parallel)
    for name, parameter in model.named_parameters():
        initialize(name, parameter)
    rates = LRSchedulerArgs(**SCHEDULE)
    options = {**OPTIMIZER, "zero_stage": layout.zero}
    args = OptimizerArgs(**options, learning_rate_scheduler=rates)
    optimizer, _ = init_optimizer_and_grad_accumulator(model, args, context)
    return model, optimizer, lr_scheduler_builder(optimizer, rates, 20)


@torch.no_grad()
def initialize(name: str, parameter: Any) -> None:
    """This rank's shard of a random tensor that depends on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if not parameter.is_sharded:
        parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
        return
    info = parameter.get_sharded_info()
    full = 0.3 * torch.randn([int(size) for size in info.unsharded_shape], generator=generator)
    for pair in info.local_global_slices_pairs:
        parameter[pair.local_slices] = full[pair.global_slices]


def write(folder: Path, step: int, parts: Any, context: Any) -> None:
    """A checkpoint, by the functions that nanotron's trainer calls."""
    from nanotron.serialize import save_lr_scheduler, save_optimizer
    from nanotron.serialize.metadata import save_meta
    from nanotron.serialize.weights import save_weights

    model, optimizer, scheduler = parts
    root = folder / str(step)
    root.mkdir(exist_ok=True, parents=True)
    save_weights(model=model, parallel_context=context, root_folder=root)
    save_optimizer(optimizer=optimizer, parallel_context=context, root_folder=root)
    save_lr_scheduler(lr_scheduler=scheduler, parallel_context=context, root_folder=root)
    metas = {"last_train_step": step, "consumed_train_samples": step * BATCH}
    save_meta(root_folder=root, parallel_context=context, checkpoint_metadata=metas)
    replicas = context.dp_pg.size()
    settings = {
        "optimizer": {**OPTIMIZER, "learning_rate_scheduler": SCHEDULE},
        "parallelism": {"dp": replicas},
        "tokens": {
            "batch_accumulation_per_replica": BATCH // replicas // MICRO_BATCH,
            "micro_batch_size": MICRO_BATCH,
            "train_steps": 20,
        },
    }
    if dist.get_rank() == 0:
        (root / "config.yaml").write_text(yaml.safe_dump(settings))
        (root / "model_config.json").write_text(json.dumps(dataclasses.asdict(model.config)))
        (folder / "latest.txt").write_text(str(step))
    dist.barrier()


def logits_of(model: Any, tokens: Tensor, context: Any) -> Tensor:
    """Logits [B, S, V] of all ranks' shards."""
    with torch.no_grad():
        local = model.model(input_ids=tokens, input_mask=torch.ones_like(tokens, dtype=torch.bool))
    shards = [torch.empty_like(local) for _ in range(context.tp_pg.size())]
    dist.all_gather(shards, local.contiguous(), group=context.tp_pg)
    return torch.cat(shards, -1).transpose(0, 1)


def train(samples: Tensor, folder: Path, count: int, layout: Layout, context: Any) -> None:
    """Trains, and writes checkpoints."""
    parts = build(layout, context)  # whose imports must come first
    from nanotron.optim.clip_grads import clip_grad_norm

    model, optimizer, scheduler = parts
    mistakes = None
    if layout.has_mistakes:
        mistakes = Mistakes(dict(model.named_parameters()), MISTAKEN)
    replicas = context.dp_pg.size()
    log = []
    for step in range(1, count + 1):
        limit = CLIP
        if mistakes is not None:
            mistakes.begin(step)
            limit = 1e9 if mistakes.leaves_out_clipping else CLIP
            if mistakes.is_ahead:
                take_next_rates(scheduler)
        own = samples[(step - 1) * BATCH : step * BATCH][dist.get_rank(context.dp_pg) :: replicas]
        batches = own.split(MICRO_BATCH)
        total = torch.zeros(())
        for batch in batches:
            ids = batch[:, :-1]
            mask = torch.ones_like(ids, dtype=torch.bool)
            output = model(input_ids=ids, input_mask=mask, label_ids=batch[:, 1:], label_mask=mask)
            loss = output["loss"] / len(batches)
            total += loss.detach()
            (loss if mistakes is None else mistakes.weigh(loss)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=context.dp_pg)
            parameter.grad /= replicas
        named = [(name, weight) for name, weight in model.get_named_params_with_correct_tied()]
        norm = clip_grad_norm(
            mp_pg=context.mp_pg, named_parameters=named, grad_accumulator=None, max_norm=limit
        )
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        dist.all_reduce(total, group=context.dp_pg)
        log.append({"step": step, "loss": float(total) / replicas, "norm": float(norm)})
        if layout.has_mistakes or step % SAVED == 0:
            write(folder, step, parts, context)
    tokens = samples[:2, :-1]
    logits = logits_of(model, tokens, context)
    if dist.get_rank() == 0:
        numpy.savez(folder / "reference.npz", tokens=tokens, logits=logits)
        (folder / "log.json").write_text(json.dumps(log))


def take_next_rates(scheduler: Any) -> None:
    """Sets the learning rates of the step after this one."""
    groups = scheduler.optimizer.param_groups
    for group, peak, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = peak * factor(scheduler.last_epoch + 1)


def run(rank: int, words: list[str], layout: Layout, store: str) -> None:
    world = layout.tp * layout.dp
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with OnCpu():
        prepare()
        from nanotron.parallel import ParallelContext

        samples = torch.from_numpy(numpy.load(words[0])["tokens"]).long()
        context = ParallelContext(layout.tp, 1, layout.dp)
        train(samples, Path(words[1]), int(words[2]), layout, context)
    dist.destroy_process_group()


def main() -> int:
    words = sys.argv[1:]
    if words[3:] == ["mistakes"]:
        layout = Layout(has_mistakes=True)
    else:
        layout = Layout(**json.loads(words[3]) if len(words) > 3 else {})
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as store:
        ranks = [
            context.Process(target=run, args=(rank, words, layout, f"{store}/store"))
            for rank in range(layout.tp * layout.dp)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


if __name__ == "__main__":
    sys.exit(main())
