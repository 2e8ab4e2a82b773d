"""Writes the checkpoints of gpt-neox that the tests read.

    PYTHONPATH=NEOX:. python tests/interop/write_neox.py FOLDER

NEOX is a checkout of EleutherAI/gpt-neox, at ea7aefd8 for the recorded files, with the DeepSpeed
of this environment instead of its fork. gpt-neox asks for CUDA where it could do without: tensors
are created on the CPU. Its settings, model, optimizer groups, schedule, batches and functions that
write a checkpoint are used as they are; the samples are given, since its data loader needs a
compiled helper. tests/golden/neox.tar.xz has the folders.
"""

from __future__ import annotations

import importlib
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
from torch import Tensor
from torch.overrides import TorchFunctionMode

SAVED = 3
"""Step after which the checkpoint is written."""
STEPS = 6
BATCH = 4
LENGTH = 16
ROWS = 48
SETTINGS: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "seq_length": LENGTH,
    "max_position_embeddings": LENGTH,
    "norm": "layernorm",
    "pos_emb": "rotary",
    "rotary_pct": 0.25,
    "gpt_j_residual": True,
    "no_weight_tying": True,
    "output_layer_parallelism": "column",
    "make_vocab_size_divisible_by": ROWS,
    "init_method": "small_init",
    "output_layer_init_method": "wang_init",
    "optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.9, 0.95], "eps": 1e-8}},
    "min_lr": 0.001,
    "lr_decay_style": "cosine",
    "lr_decay_iters": 10,
    "train_iters": 10,
    "warmup": 0.2,
    "weight_decay": 0.1,
    "gradient_clipping": 1.0,
    "train_micro_batch_size_per_gpu": 1,
    "train_batch_size": BATCH,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "precision": "fp32",
    "zero_optimization": {"stage": 1},
    "checkpoint_activations": False,
    "partition_activations": False,
    "use_cpu_initialization": True,
    "scaled_upper_triang_masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "rope_fusion": False,
    "tokenizer_type": "HFTokenizer",
    "distributed_backend": "gloo",
    "log_interval": 1,
    "checkpoint_factor": 3,
    "seed": 7,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipe_parallel_size": 2, "world": 4},
    "shards": {"pipe_parallel_size": 1, "model_parallel_size": 2, "world": 4},
    "sequential": {"pipe_parallel_size": 0, "world": 1},
}
"""PP 2 x DP 2 and TP 2 x DP 2 with the pipeline's engine, and one process without it; ZeRO 1."""


class OnCpu(TorchFunctionMode):
    """Creates tensors on the CPU that are asked for on a GPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return args[0] if func is Tensor.cuda else func(*args, **kwargs)


def prepare() -> None:
    """What gpt-neox needs instead of a GPU, and of old packages."""
    import packaging.version

    resources = ModuleType("pkg_resources")
    resources.packaging = packaging  # type: ignore[attr-defined]
    sys.modules.setdefault("pkg_resources", resources)
    apex = ModuleType("apex.optimizers")  # the kernel of which is for GPUs
    apex.FusedAdam = torch.optim.AdamW  # type: ignore[attr-defined]
    sys.modules |= {"apex": ModuleType("apex"), "apex.optimizers": apex}
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.LongTensor = torch.LongTensor
    torch.cuda.get_rng_state = lambda *_: torch.zeros(1, dtype=torch.uint8)


def arguments(folder: Path, layout: dict[str, Any], rank: int) -> Any:
    """gpt-neox's own arguments, with the settings as a file next to the checkpoints."""
    from megatron.neox_arguments import NeoXArgs

    values = SETTINGS | {key: value for key, value in layout.items() if key != "world"}
    # Of the pipeline's engine, its DeepSpeed asks for more batches than gpt-neox gives here.
    values["checkpoint_validation_with_forward_pass"] = layout["pipe_parallel_size"] == 0
    shards = max(layout["pipe_parallel_size"], 1) * layout.get("model_parallel_size", 1)
    values["gradient_accumulation_steps"] = BATCH * shards // layout["world"]
    text = json.dumps(values, indent=2)
    args = NeoXArgs.from_dict(
        {
            **values,
            "global_num_gpus": layout["world"],
            "save": str(folder),
            "config_files": {"settings.yml": text},
            "hostfile": None,
        }
    )
    args.rank = rank
    args.local_rank = rank
    args.world_size = layout["world"]
    args.padded_vocab_size = ROWS
    args.tokenizer = SimpleNamespace(eod=0, vocab_size=ROWS)
    args.iteration = 0
    return args


def run(folder: Path, layout: dict[str, Any], rank: int, store: str) -> None:
    torch.set_num_threads(1)
    world = layout["world"]
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    import deepspeed

    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed("gloo", verbose=False)
    with OnCpu():
        prepare()
        train(folder, layout, rank)
    dist.destroy_process_group()


def train(folder: Path, layout: dict[str, Any], rank: int) -> None:
    from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
    from megatron import mpu, training
    from megatron.checkpointing import save_checkpoint
    from megatron.initialize import setup_deepspeed_random_and_activation_checkpointing

    args = arguments(folder, layout, rank)
    stages = max(layout["pipe_parallel_size"], 1)
    shards = layout.get("model_parallel_size", 1)
    replicas = layout["world"] // (stages * shards)
    topology = PipeModelDataParallelTopology(num_pp=stages, num_mp=shards, num_dp=replicas)
    mpu.initialize_model_parallel(shards, topology=topology)
    setup_deepspeed_random_and_activation_checkpointing(args)
    torch.manual_seed(args.seed)
    mpu.model_parallel_cuda_manual_seed(args.seed)
    model, optimizer, scheduler, _ = training.setup_model_and_optimizer(args)
    samples = torch.randint(1, ROWS, (STEPS * BATCH, LENGTH + 1), generator=generator(3))
    losses = []
    rates = []
    for step in range(STEPS):
        own = samples[step * BATCH : (step + 1) * BATCH][mpu.get_data_parallel_rank() :: replicas]
        batches = iter([{"text": sample[None]} for sample in own])
        rates.append(optimizer.param_groups[0]["lr"])
        result, _ = training.train_step(
            neox_args=args,
            timers=lambda name: SimpleNamespace(start=int, stop=int, reset=int),
            data_iterator=batches,
            model=model,
            optimizer=optimizer,
            lr_scheduler=scheduler,
        )
        losses.append(float(result["lm_loss"]))
        if step + 1 == SAVED:
            save_checkpoint(args, step + 1, model, optimizer, scheduler)
    if rank == 0:
        numpy.savez(folder / "results.npz", losses=losses, rates=rates, samples=samples)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> int:
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    for name, layout in LAYOUTS.items():
        (folder / name).mkdir(parents=True)
        with tempfile.TemporaryDirectory() as store:
            ranks = [
                context.Process(target=run, args=(folder / name, layout, rank, f"{store}/store"))
                for rank in range(layout["world"])
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
            if any(process.exitcode for process in ranks):
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
