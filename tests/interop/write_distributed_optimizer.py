"""Writes the checkpoints of megatron-core's distributed optimizer that the tests read.

    PYTHONPATH=build/interop:. python tests/interop/write_distributed_optimizer.py FOLDER

For each layout: `torch_dist` checkpoints of one run in both forms that megatron-core 0.16 writes,
`dp_reshardable`, which is its default, and `fully_reshardable`. The gradients are random numbers
that depend on the names of the parameters. tests/golden/distributed_optimizer.tar.xz has them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

STEPS = 3
FORMS = ("dp_reshardable", "fully_reshardable")


@dataclass(frozen=True)
class Layout:
    """A run that is saved."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    half: bool = False
    gated: bool = False
    bucket: int | None = None
    """Elements of a bucket."""


LAYOUTS = {
    "tp2": Layout(tp=2),
    "tp2_pp2_gated_bf16": Layout(tp=2, pp=2, half=True, gated=True),
    "dp2_buckets_bf16": Layout(dp=2, half=True, bucket=600),
}


def main() -> int:
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("spawn")
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as store:
            ranks = [
                context.Process(target=write, args=(folder / name, layout, rank, f"{store}/store"))
                for rank in range(layout.tp * layout.pp * layout.dp)
            ]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()
            if any(each.exitcode for each in ranks):
                return 1
    return 0


def write(folder: Path, layout: Layout, rank: int, store: str) -> None:
    """Trains and saves on one rank."""
    from tests.interop.on_cpu import OnCpu, patch_devices

    torch.set_num_threads(1)
    world = layout.tp * layout.pp * layout.dp
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with pytest.MonkeyPatch.context() as patch, OnCpu():
        patch_devices(patch)
        _train_and_save(folder, layout)
    dist.destroy_process_group()


def _train_and_save(folder: Path, layout: Layout) -> None:
    from megatron.core import dist_checkpointing, optimizer, parallel_state, transformer
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs

    parallel_state.initialize_model_parallel(layout.tp, layout.pp, create_gloo_process_groups=True)
    dtype = torch.bfloat16 if layout.half else torch.float32
    sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "ffn_hidden_size": 24}
    silu = torch.nn.functional.silu
    gelu = torch.nn.functional.gelu
    config = transformer.TransformerConfig(
        **sizes, add_bias_linear=not layout.gated, gated_linear_unit=layout.gated,
        activation_func=silu if layout.gated else gelu, hidden_dropout=0.0, attention_dropout=0.0,
        use_cpu_initialization=True, params_dtype=dtype, bf16=layout.half,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        pipeline_dtype=dtype,
    )  # fmt: skip
    torch.manual_seed(1)
    model = GPTModel(
        config, gpt_layer_specs.get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True, position_embedding_type="learned_absolute",
    ).to(dtype)  # fmt: skip
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=layout.bucket
    )
    replicas = DistributedDataParallel(config, options, model)
    settings = optimizer.OptimizerConfig(
        optimizer="adam", lr=0.1, weight_decay=0.1, bf16=layout.half, params_dtype=dtype,
        use_distributed_optimizer=True, clip_grad=0.0,
    )  # fmt: skip
    adam = optimizer.get_megatron_optimizer(settings, [replicas])
    for step in range(STEPS):
        for name, parameter in model.named_parameters():
            parameter.main_grad.copy_(_gradient(name, parameter, model, step))
        replicas.finish_grad_sync()
        adam.step()
    args = argparse.Namespace(
        **sizes, max_position_embeddings=16, seq_length=16, padded_vocab_size=64, vocab_size=64,
        consumed_train_samples=12, consumed_valid_samples=0, iteration=STEPS, global_batch_size=4,
        tensor_model_parallel_size=layout.tp, pipeline_model_parallel_size=layout.pp,
        normalization="LayerNorm", position_embedding_type="learned_absolute", kv_channels=8,
        add_bias_linear=not layout.gated, swiglu=layout.gated, layernorm_epsilon=1e-5,
        untie_embeddings_and_output_weights=False, group_query_attention=False, num_query_groups=1,
        use_distributed_optimizer=True, bf16=layout.half, fp16=False, bias_gelu_fusion=True,
        optimizer="adam", adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8,
    )  # fmt: skip
    for form in FORMS:
        target = folder / form / f"iter_{STEPS:07d}"
        target.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        weights = model.sharded_state_dict()
        metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": True}
        states = adam.sharded_state_dict(weights, is_loading=False, metadata=metadata)
        content = {
            "model": weights, "optimizer": states, "args": args, "checkpoint_version": 3.0,
            "iteration": STEPS, "num_floating_point_operations_so_far": 0,
        }  # fmt: skip
        dist_checkpointing.save(content, str(target), content_metadata=metadata)
        if dist.get_rank() == 0:
            (folder / form / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def _gradient(name: str, parameter: Any, model: Any, step: int) -> torch.Tensor:
    """Equal for all copies of a parameter."""
    from megatron.core import parallel_state

    parts = name.replace("output_layer", "embedding.word_embeddings").split(".")
    if "layers" in parts:
        number = parts.index("layers") + 1
        parts[number] = str(int(parts[number]) + model.decoder.layers[0].layer_number)
    is_sharded = getattr(parameter, "tensor_model_parallel", False)
    rank = parallel_state.get_tensor_model_parallel_rank() if is_sharded else 0
    seed = zlib.crc32(f"{'.'.join(parts)} {rank} {step}".encode())
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))


if __name__ == "__main__":
    sys.exit(main())
