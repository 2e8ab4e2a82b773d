"""The keys of DeepSpeed files: accepted, renamed, ignored and refused ones.

Keys of blocks that DeepSpeed defines as pydantic models are in keys.json, written by
`python tests/versions/make_ds_keys.py`. The tables here have the rest. Key names:
https://www.deepspeed.ai/docs/config-json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron_ds.engine.ds_config.values import KINDS, Kind

REMOVED = "the installed DeepSpeed no longer has it"
NOT_YET = "not supported yet"
REFUSED: dict[str, str] = {
    "amp": f"{REMOVED}; use --bf16 or --fp16",
    "compression_training": REMOVED,
    "eigenvalue": REMOVED,
    "elasticity": f"{REMOVED}; give the batch sizes",
    "graph_harvesting": REMOVED,
    "nebula": REMOVED,
    "progressive_layer_drop": REMOVED,
    "quantize_training": REMOVED,
    "sparse_attention": REMOVED,
    "sparse_gradients": REMOVED,
    "zero_optimization.mics_shard_size": REMOVED,
    "zero_optimization.mics_hierarchical_params_gather": REMOVED,
    "zero_optimization.zeropp_loco_param": REMOVED,
    "zero_optimization.legacy_stage1": f"{REMOVED}; use stage 1",
    "zero_optimization.elastic_checkpoint": "changes the layout of checkpoints",
    "zero_optimization.pipeline_loading_checkpoint": "all ranks load their files at once",
    "zero_optimization.compute_grad_norm": "the norm is always computed; leave the key out",
    "zero_optimization.zenflow": (
        "it decides by itself when gradients are applied (gradient_accumulation_steps becomes its "
        "update_interval), so that a step is no longer one of the global batch size, and most "
        "gradients are applied later; use offload_optimizer"
    ),
    "zero_optimization.leaf_module": "the model has no module that needs it",
    "zero_optimization.save_muon_momentum_buffer_in_memory": "the optimizers are adam and sgd",
    "fp16.fp16_master_weights_and_grads": "master weights and their gradients are kept in fp32",
    "optimizer.legacy_fusion": REMOVED,
    "optimizer.params.amsgrad": "AdamW without AMSGrad is used",
    "optimizer.params.nesterov": "SGD uses plain momentum",
    "optimizer.params.dampening": "SGD uses plain momentum",
    "checkpoint.load_universal": "checkpoints are loaded with --load",
    "checkpoint.use_node_local_storage": "--save must be one folder shared by all nodes",
    "checkpoint.parallel_write": "each rank of a stage writes the weights in one file",
    "checkpoint.writer": "DeepSpeed cannot load the files of its own writers",
    "max_grad_norm": "DeepSpeed ignores it; use gradient_clipping or --clip-grad",
    "managed_gradient_accumulation": "the training loop sets the accumulation boundary",
    "gradient_allreduce_op": "gradients are averaged over data-parallel ranks",
    "torch_autocast": "use --bf16",
    "tensor_parallel": "use --tensor-model-parallel-size",
    "sequence_parallel_size": "use --ds-sequence-parallel-size",
    "seq_parallel_communication_data_type": "it is not configurable; leave the key out",
    "expert_parallel": "use --num-experts and --expert-model-parallel-size",
    "use_data_before_expert_parallelism": "the order of the ranks is fixed",
    "pipeline": (
        "stages are set by --pipeline-model-parallel-size and --pp-partition-method, with "
        "DeepSpeed's 1F1B schedule"
    ),
    "data_efficiency": "its data sampling and random-LTD are not supported yet",
    "compile.passes": "the ZeRO stage selects the passes",
    "compile.autoep_non_moe": "use --compile",
    "hybrid_engine": NOT_YET,
    "weight_quantization": "for inference only",
}
"""Unsupported keys that would change the run -> reason or replacement. A key that is off (false, or
an object with nothing enabled) changes nothing: it is dropped with a warning."""

SHORT_KEYS = (
    "gather_16bit_weights_on_model_save prefetch_bucket_size param_persistence_threshold "
    "model_persistence_threshold max_live_parameters max_reuse_distance"
)
"""Keys of zero_optimization without their prefix `stage3_`."""
RENAMED: dict[str, str] = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": (
        "zero_optimization.stage3_gather_16bit_weights_on_model_save"
    ),
    **{f"zero_optimization.{k}": f"zero_optimization.stage3_{k}" for k in SHORT_KEYS.split()},
    "optimizer.params.max_grad_norm": "gradient_clipping",
}
"""Old and short spellings of keys -> current key."""

OLD_SWITCHES: dict[str, tuple[str, Any]] = {
    "zero_optimization.cpu_offload": ("zero_optimization.offload_optimizer", {"device": "cpu"}),
    "zero_optimization.cpu_offload_param": ("zero_optimization.offload_param", {"device": "cpu"}),
    "zero_optimization.cpu_offload_params": ("zero_optimization.offload_param", {"device": "cpu"}),
    "fp32_allreduce": ("communication_data_type", "fp32"),
    "allreduce_always_fp32": ("communication_data_type", "fp32"),
}
"""Old switches -> the key and value that replace them if they are true."""

OLD_PIN_KEY = "zero_optimization.cpu_offload_use_pin_memory"
IGNORED_KEYS: dict[str, str] = {
    "dataloader_drop_last": "all batches are complete",
    "optimizer.params.bias_correction": "Adam always corrects the bias",
    "vocabulary_size": "the tokenizer gives it",
    "zero_optimization.zero_quantized_nontrainable_weights": "all weights are trained",
}
"""Keys without effect -> reason."""
DROPPED_IF: dict[str, Any] = {"optimizer.params.bias_correction": True}
"""Keys of IGNORED_KEYS that may only be dropped with this value."""


def _keys(**names: str) -> dict[str, Kind]:
    """Keys and their kinds, from one string of key names for each kind."""
    return {key: KINDS[kind] for kind, keys in names.items() for key in keys.split()}


def _model_blocks() -> dict[str, dict[str, Kind]]:
    """Keys of DeepSpeed's models but for those of the tables above."""
    text = (Path(__file__).parent / "keys.json").read_text(encoding="utf-8")
    treated = {*REFUSED, *RENAMED, *OLD_SWITCHES, *IGNORED_KEYS}
    return {
        block: {key: KINDS[kind] for key, kind in keys.items() if f"{block}.{key}" not in treated}
        for block, keys in json.loads(text)["blocks"].items()
    }


PASSED_KEYS = _keys(
    bool="wall_clock_breakdown dump_state disable_python_gc memory_breakdown prescale_gradients "
    "disable_allgather zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
    float="gradient_predivide_factor",
    size="steps_per_print",
    dtype="communication_data_type",
    str="log_level",
    object="comms_logger flops_profiler aio timers tensorboard csv_monitor wandb comet checkpoint "
    "compile",
)
"""Top-level keys that are passed to DeepSpeed unchanged."""

TOP_KEYS = PASSED_KEYS | _keys(
    int="train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps",
    float="gradient_clipping",
    object="zero_optimization fp16 bf16 data_types optimizer scheduler activation_checkpointing "
    "curriculum_learning",
)
"""All supported top-level keys."""

BLOCKS: dict[str, dict[str, Kind]] = _model_blocks() | {
    "data_types": _keys(dtype="grad_accum_dtype"),
    "optimizer": _keys(str="type", object="params"),
    "optimizer.params": _keys(
        float="lr eps weight_decay momentum", betas="betas", bool="adam_w_mode torch_adam fused"
    ),
    "scheduler": _keys(str="type", object="params"),
    "scheduler.params": _keys(
        float="warmup_min_lr warmup_max_lr warmup_min_ratio cos_min_ratio",
        int="warmup_num_steps total_num_steps",
        str="warmup_type",
    ),
    "curriculum_learning": _keys(
        bool="enabled",
        str="curriculum_type schedule_type",
        int="min_difficulty max_difficulty",
        object="schedule_config",
    ),
    "curriculum_learning.schedule_config": _keys(
        int="total_curriculum_step difficulty_step", float="root_degree", any="difficulty max_step"
    ),
    "activation_checkpointing": _keys(
        bool="partition_activations cpu_checkpointing contiguous_memory_optimization "
        "synchronize_checkpoint_boundary profile",
        int="number_checkpoints",
    ),
    "flops_profiler": _keys(
        bool="enabled detailed",
        int="profile_step module_depth top_modules",
        float="recompute_fwd_factor",
        str="output_file",
    ),
    "aio": _keys(
        size="block_size queue_depth intra_op_parallelism",
        bool="single_submit overlap_events use_gds",
    ),
    "timers": _keys(object="throughput"),
    "checkpoint": _keys(str="tag_validation"),
}
"""Supported keys of each block by its dotted name -> kind of the value."""
