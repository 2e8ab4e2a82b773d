"""Training checkpoints of two layouts, written from full tensors without an engine.

DeepSpeed's files have the contents that its engines give them: without ZeRO one file with the
parameters and their states; with ZeRO 1 the weights of each tensor-parallel rank, and for each
data-parallel rank a part of the flat states.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ds.checkpoint.files.local_files import write_json, write_pointers
from megatron_ds.checkpoint.lineage import Lineage
from megatron_ds.checkpoint.metadata import (
    MANIFEST,
    RUN,
    DataOrder,
    ParallelLayout,
    RunRecord,
    ShardRecord,
    manifest_text,
)
from megatron_ds.config import Config, DataConfig, ModelConfig, MoEConfig, ScheduleConfig
from megatron_ds.conversion.source import declared_weights
from megatron_ds.data.blend.blend_history import BlendHistory, BlendPhase, SourceId, SourceProgress
from megatron_ds.engine.deepspeed.checkpoint_io import write_tensors
from megatron_ds.engine.deepspeed.partitions import FlatPartition, ParameterPlace
from megatron_ds.parallel.sharding import take_shard
from megatron_ds.train_state import TrainState

MODEL = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, seq_length=4, vocab_size=10)
KINDS = ("exp_avg", "exp_avg_sq")
STEPS = 7
COUNTERS = {"global_steps": STEPS, "global_samples": 28, "skipped_steps": 0}
Tensors = dict[str, dict[str, Tensor]]
"""Full tensors by kind and name, without padding."""


def random_states(seed: int = 1) -> Tensors:
    generator = torch.Generator().manual_seed(seed)
    weights = declared_weights(MODEL, MoEConfig())
    return {
        kind: {name: torch.randn(w.shape, generator=generator) for name, w in weights.items()}
        for kind in ("master", *KINDS)
    }


def write_checkpoint(
    folder: Path, states: Tensors, *, tp: int = 1, dp: int = 1, stage: int = 0, iteration: int = 8
) -> Path:
    """Writes SAVE/global_stepN and the pointers; returns the folder of the checkpoint."""
    path = folder / f"global_step{iteration}"
    path.mkdir(parents=True)
    specs = {name: weight.shard for name, weight in declared_weights(MODEL, MoEConfig()).items()}
    rows = 4 * math.ceil(MODEL.vocab_size / 4)  # as tensor parallelism pads
    padded = {
        kind: {
            name: torch.cat([t, torch.zeros(rows - len(t), *t.shape[1:])])
            if name == "embedding.word.weight"
            else t
            for name, t in tensors.items()
        }
        for kind, tensors in states.items()
    }
    sections = {
        name: (rows,) if name == "embedding.word.weight" else spec.sections
        for name, spec in specs.items()
        if spec is not None
    }

    def shards(kind: str, rank: int) -> dict[str, Tensor]:
        found = {}
        for name, tensor in padded[kind].items():
            spec = specs[name]
            if spec is not None:
                spec = dataclasses.replace(spec, sections=sections[name])
                tensor = take_shard(tensor, spec, rank, tp)
            found[name] = tensor.clone()
        return found

    records = {}
    for rank in range(tp):
        parts = {kind: shards(kind, rank) for kind in padded}
        files = _stage0(parts) if stage == 0 else _stage1(parts, rank, dp)
        records |= {name: write_tensors(value, path / name) for name, value in files.items()}
    config = Config(
        model=MODEL,
        data=DataConfig(data_path=("corpus",)),
        schedule=ScheduleConfig(micro_batch_size=1, global_batch_size=4),
    )
    run = RunRecord(
        state=TrainState(iteration, 4 * iteration, 16 * iteration, 4 * iteration, 16, iteration),
        config=config.to_dict(),
        layout=ParallelLayout(tp, dp, stage, "fp32", "adam", False, False, 0),
        data_order=DataOrder.of(config, dp),
        shards={name: ShardRecord(specs[name].dim, sections[name]) for name in sections},
        branch=Lineage.new(),
        partitions=(_partition(shards("master", 0), stage, dp),),
        data=BlendHistory(
            1,
            (SourceProgress(SourceId("corpus", "0", (0, 9)), consumed=32),),
            (BlendPhase(0, (0,), (1.0,), (0,)),),
        ),
    )
    records[RUN] = write_json(path / RUN, run.to_dict())
    (path / MANIFEST).write_text(manifest_text(records))
    write_pointers(path)
    return path


def _stage0(parts: Tensors) -> dict[str, Any]:
    names = list(parts["master"])
    optimizer = {
        "state": {
            number: {"step": STEPS, **{kind: parts[kind][name] for kind in KINDS}}
            for number, name in enumerate(names)
        },
        "param_groups": [{"params": list(range(len(names))), "lr": 0.1}],
    }
    content = {"module": parts["master"], "optimizer": optimizer, **COUNTERS}
    return {"mp_rank_00_model_states.pt": content}


def _stage1(parts: Tensors, rank: int, dp: int) -> dict[str, Any]:
    files: dict[str, Any] = {
        f"mp_rank_{rank:02d}_model_states.pt": {"module": parts["master"], **COUNTERS}
    }
    for dp_rank in range(dp):
        flats = {kind: _flat(tensors, dp).chunk(dp)[dp_rank] for kind, tensors in parts.items()}
        states = {
            "single_partition_of_fp32_groups": [flats["master"].clone()],
            "base_optimizer_state": {
                "state": {0: {"step": STEPS, **{kind: flats[kind].clone() for kind in KINDS}}},
                "param_groups": [{"params": [0]}],
            },
        }
        name = f"zero_pp_rank_{dp_rank}_mp_rank_{rank:02d}_optim_states.pt"
        files[name] = {"optimizer_state_dict": states}
    return files


def _flat(tensors: dict[str, Tensor], dp: int) -> Tensor:
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()])
    return torch.nn.functional.pad(flat, (0, -len(flat) % dp))


def _partition(shards: dict[str, Tensor], stage: int, dp: int) -> FlatPartition:
    places = []
    offset = 0
    for name, tensor in shards.items():
        places.append(ParameterPlace(name, tuple(tensor.shape), offset))
        offset += tensor.numel()
    return FlatPartition(-(-offset // dp) if stage else offset, tuple(places))
