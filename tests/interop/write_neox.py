"""Writes the checkpoints of gpt-neox that the tests read.

    PYTHONPATH=NEOX:. python tests/interop/write_neox.py FOLDER [LAYOUT ...]

NEOX is a checkout of EleutherAI/gpt-neox, at ea7aefd8 for the recorded files, with the DeepSpeed
of this environment instead of its fork. gpt-neox asks for CUDA where it could do without: tensors
are created on the CPU. Its settings, model, optimizer groups, schedule, batches and functions that
write a checkpoint are used as they are; the samples are given, since its data loader needs a
compiled helper. tests/golden/neox.tar.xz has the folders of all layouts but `mistakes`, which is in
tests/golden/neox_mistakes.tar.xz: a run each of whose steps makes a mistake, and is saved.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import torch
import torch.distributed as dist
from on_cpu import OnCpu
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer
from trainer_mistakes import FIRST, LAST, Mistakes, Place

SAVED = 3
"""Step after which the checkpoint is written; in the run with mistakes, from `FIRST` - 1 on too."""
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
    "checkpoint_validation_with_forward_pass": False,
    "seed": 7,
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pipeline": {"pipe_parallel_size": 2, "world": 4},
    "shards": {"pipe_parallel_size": 1, "model_parallel_size": 2, "world": 4},
    "sequential": {"pipe_parallel_size": 0, "world": 1},
    "mistakes": {
        "pipe_parallel_size": 0,
        "world": 1,
        "hidden_size": 8,
        "rotary_pct": 0.5,
        "gradient_clipping": 0.1,
        "lr_decay_iters": 20,
        "train_iters": 20,
    },
}
"""PP 2 x DP 2 and TP 2 x DP 2 with the pipeline's engine, and one process without it; ZeRO 1."""
MISTAKEN = (
    "sequential.3.mlp.linear1.weight",
    "sequential.2.mlp.linear2.weight",
    "sequential.2.attention.dense.weight",
)


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
    mistakes = ZeroMistakes.of(model) if layout == LAYOUTS["mistakes"] else None
    steps = LAST if mistakes else STEPS
    samples = torch.randint(1, ROWS, (steps * BATCH, LENGTH + 1), generator=generator(3))
    losses = []
    rates = []
    for step in range(steps):
        own = samples[step * BATCH : (step + 1) * BATCH][mpu.get_data_parallel_rank() :: replicas]
        batches = iter([{"text": sample[None]} for sample in own])
        rates.append(optimizer.param_groups[0]["lr"])
        if mistakes:
            mistakes.begin_step(step + 1, model, scheduler)
        with recorded_logits(model) as logits:
            result, _ = training.train_step(
                neox_args=args,
                timers=lambda name: SimpleNamespace(start=int, stop=int, reset=int),
                data_iterator=batches,
                model=model,
                optimizer=optimizer,
                lr_scheduler=scheduler,
            )
        losses.append(float(result["lm_loss"]))
        if step + 1 == SAVED or (mistakes and step + 1 >= FIRST - 1):
            save_checkpoint(args, step + 1, model, optimizer, scheduler)
        first = mpu.get_data_parallel_rank() == mpu.get_model_parallel_rank() == 0
        if step == SAVED and logits and first:
            path = folder / "reference.npz"
            numpy.savez(path, tokens=own[:2, :-1], logits=torch.cat(logits)[:2])
    if rank == 0:
        numpy.savez(folder / "results.npz", losses=losses, rates=rates, samples=samples)


@contextlib.contextmanager
def recorded_logits(model: nn.Module) -> Iterator[list[Tensor]]:
    """The logits [B, S, V] of each pass through the output layer, if this rank has it."""
    from megatron import mpu

    recorded: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        full = mpu.gather_from_model_parallel_region(logits.detach())
        recorded.append(full.clone())  # which the loss overwrites

    layers = ("ParallelLinear", "ParallelLinearPipe")
    hooks = [
        module.register_forward_hook(record)
        for module in model.modules()
        if type(module).__name__ in layers
    ]
    try:
        yield recorded
    finally:
        for hook in hooks:
            hook.remove()


class ZeroMistakes(Mistakes):
    """Makes the mistake of a step in the flat tensors of DeepSpeed's ZeRO 1."""

    @classmethod
    def of(cls, engine: Any) -> ZeroMistakes:
        mistakes = cls(dict(engine.module.named_parameters()), MISTAKEN)
        backward = engine.backward
        engine.backward = lambda loss: backward(mistakes.weigh(loss))
        return mistakes

    def begin_step(self, step: int, engine: Any, scheduler: Any) -> None:
        """Starts a step, counted from 1."""
        self.begin(step)
        limit = LAYOUTS["mistakes"]["gradient_clipping"]
        engine.optimizer.clip_grad = 0.0 if self.leaves_out_clipping else limit
        if self.is_ahead:
            scheduler.num_iters += 1
            for group in engine.optimizer.param_groups:
                group["lr"] = scheduler.get_lr()
            scheduler.num_iters -= 1

    def places(self, optimizer: Optimizer) -> dict[str, Place]:
        """Where the flat tensor of a group has its weights."""
        ((flat,),) = (group["params"] for group in optimizer.param_groups)
        start = flat.untyped_storage().data_ptr()
        places = {}
        for name, weight in self.parameters.items():
            mapping = weight._hp_mapping  # type: ignore[attr-defined]
            address = mapping.hp_fragment_address
            if mapping.hp_fragment.untyped_storage().data_ptr() == start:
                part = slice(address.start, address.start + address.numel)
                places[name] = Place(flat, part, weight.shape)
        return places


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def main() -> int:
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    for name in sys.argv[2:] or LAYOUTS:
        layout = LAYOUTS[name]
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
