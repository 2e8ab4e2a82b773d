"""Every contradiction between options of a run, by code and fields."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron_ds import schedule_validation
from megatron_ds.config import GROUPS, Config, ParallelConfig
from megatron_ds.config.fields import option_fields
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.merge import merge_file
from tests.problems import codes, fields

VALID = {
    "num_layers": 2,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "seq_length": 64,
    "vocab_size": 91,
    "tokenizer_type": "NullTokenizer",
    "data_path": ("data",),
    "micro_batch_size": 2,
    "train_samples": 1000,
    "lr": 1.0,
}
DP_SIZE = 2
ROPE = {"position_embedding_type": "rope"}
FULL = {"recompute_granularity": "full"}
SLICES = "ds_sequence_parallel_size"
ULYSSES = {"num_attention_heads": 12}
SEQUENCE_PARALLEL = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EXPERTS = {"num_experts": (4,)}
WSD = {"lr_decay_style": "WSD"}
STAGES = {"pipeline_model_parallel_size": 2}
FOLDED = {**STAGES, "num_layers": 4, "pipeline_schedule": "dualpipev", "global_batch_size": 8}
CONTIGUOUS = {**FULL, "partition_activations": True, "contiguous_checkpointing": True}
CURRICULUM = {"curriculum_seqlen": (8, 64, 9)}
ITERATIONS = {"train_samples": None, "train_iters": 7}
TOKENS = {"train_samples": None, "train_tokens": 9999}
OWN_FILES = {"data_path": None, "train_data_path": ("x",)}
TIKTOKEN = {"tokenizer_type": "TikTokenizer"}
LINEAR = {"weight_decay_incr_style": "linear"}
BERT = {"tokenizer_type": "BertWordPieceCase"}
ADJUSTED = {"override_opt_param_scheduler": True, "use_checkpoint_opt_param_scheduler": True}


def config_of(**changes: Any) -> Config:
    return Config().with_values({**VALID, **changes})


def problems(config: Config, dp_size: int = DP_SIZE) -> list[Problem]:
    parallel = config.parallel
    replica = parallel.tensor_model_parallel_size * parallel.ds_sequence_parallel_size
    world_size = dp_size * replica
    return [*config.problems(world_size), *schedule_validation.problems(config, dp_size)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_query_groups": 2, "tensor_model_parallel_size": 2},
        FOLDED,
        {"vocab_size": 91, "make_vocab_size_divisible_by": 1},
        {"attention_dropout": 0.0, "seed": (1 << 32) - 1, "clip_grad": 0.0},
        {"global_batch_size": 16, "rampup_batch_size": (4, 4, 100)},
        FULL,
        {**FULL, "deepspeed_activation_checkpointing": True, "profile_backward": True},
        {**FULL, "partition_activations": True, "checkpoint_in_cpu": True},
        {**FULL, "checkpoint_num_layers": 2},
        {**EXPERTS, "expert_interval": 2, "expert_model_parallel_size": 2},
        {"num_experts": (4, 4), "moe_router_topk": 4},
        {"num_experts": (1,), "moe_router_topk": 2, "expert_interval": 3},
        {**SEQUENCE_PARALLEL, **FULL, "curriculum_seqlen": (8, 64, 9)},
        {"skip_train_iteration_range": ("3", "7-9", "8-8"), "skip_loss_spikes": 6.0},
        {**SEQUENCE_PARALLEL, "tensor_model_parallel_size": 1, "seq_length": 63},
        {**WSD, "lr_wsd_decay_samples": 400},
        ITERATIONS,
        {"weight_decay_incr_style": "cosine", "start_weight_decay": 0.1, "end_weight_decay": 0.2},
        # Sequence-parallel ranks have equal shares; several of them may share a key-value head.
        {**ULYSSES, SLICES: 2},
        {**ULYSSES, SLICES: 4, "num_query_groups": 2},
        {**ULYSSES, SLICES: 4, "num_query_groups": 1},
        {**ULYSSES, SLICES: 2, "num_query_groups": 6},
        {**ULYSSES, SLICES: 2, "num_query_groups": 2, "tensor_model_parallel_size": 2},
        {**ULYSSES, SLICES: 3, "seq_length": 66},
        {**ULYSSES, SLICES: 4, "curriculum_seqlen": (8, 64, 10)},
        {**ULYSSES, SLICES: 4, "curriculum_seqlen": (8, 60, 10)},
        {**ULYSSES, SLICES: 4, "curriculum_seqlen": (36, 36, 10), "curriculum_seqlen_step": 6},
        {**ULYSSES, SLICES: 2, **SEQUENCE_PARALLEL, "seq_length": 68},
        {**ULYSSES, SLICES: 2, "tensor_model_parallel_size": 2, "seq_length": 66},
    ],
)
def test_valid_configurations_have_no_problem(changes):
    assert problems(config_of(**changes)) == []


BATCH_SIZES = "step_batch_size_schedule"
HEADS = "heads-not-divisible-by-sequence-parallel-size"
DECAY = "weight-decay"
INDIVISIBLE = "not-divisible-by-expert-parallel-size"
CASES: list[tuple[dict[str, Any], str]] = [
    # Model.
    ({"hidden_size": 50}, "hidden-size-not-divisible-by-heads"),
    ({"position_embedding_type": "relative"}, "invalid-choice"),
    ({"num_query_groups": 4}, "heads-not-divisible-by-query-groups"),
    ({"max_position_embeddings": 8}, "sequence-exceeds-position-embeddings"),
    ({**ROPE, "rotary_percent": 0.4}, "odd-rotary-dimension: rotary_percent kv_channels"),
    # Mixture of experts.
    ({"expert_model_parallel_size": 2}, "expert-parallel-size-without-experts"),
    ({**EXPERTS, "compile": True}, "experts-with-compile"),
    ({"num_experts": (4, 2)}, "numbers-of-experts-differ"),
    ({"num_experts": (2,), "moe_router_topk": 3}, "topk-exceeds-experts"),
    ({**EXPERTS, "expert_interval": 3}, "no-layer-has-experts: expert_interval num_layers"),
    ({"num_experts": (3,), "expert_model_parallel_size": 2}, f"experts-{INDIVISIBLE}"),
    ({**EXPERTS, "expert_model_parallel_size": 4}, f"data-parallel-size-{INDIVISIBLE}:"),
    # Pipeline stages.
    ({**STAGES, **CONTIGUOUS}, "contiguous-checkpointing-with-pipeline: contiguous_checkpointing"),
    ({"pipeline_model_parallel_size": 4}, "more-stages-than-layers"),
    ({**FOLDED, "num_layers": 3}, "more-stages-than-layers: pipeline_model_parallel_size"),
    ({**FOLDED, "pp_partition_method": "2,2"}, "pp-partition-list: pp_partition_method"),
    ({**FOLDED, "global_batch_size": 6}, "dualpipev-micro-batches: pipeline_schedule"),
    ({**FOLDED, "rampup_batch_size": (6, 2, 100)}, "dualpipev-micro-batches: pipeline_schedule"),
    (
        {**FOLDED, "global_batch_size": None, BATCH_SIZES: ("0:8", "1000:6", "2000:10")},
        "dualpipev-micro-batches: pipeline_schedule",
    ),
    ({**STAGES, "pp_partition_method": "2"}, "pp-partition-list"),
    ({**STAGES, "pp_partition_method": "2,0"}, "pp-partition-list"),
    ({**STAGES, "pp_partition_method": "2,1"}, "pp-partition-list"),
    ({**STAGES, "pp_partition_method": "profile"}, "pp-partition-method: pp_partition_method"),
    ({**STAGES, "pp_partition_method": "type:("}, "pp-partition-pattern: pp_partition_method"),
    ({**STAGES, "pp_partition_method": "type:mlp"}, "pp-partition-type: pp_partition_method"),
    # Activation checkpointing.
    ({**FULL, "checkpoint_num_layers": 3}, "recompute-layers-exceed-model: checkpoint_num_layers"),
    # Sequence parallelism.
    (
        {**SEQUENCE_PARALLEL, "seq_length": 63},
        "sequence-not-divisible: seq_length sequence_parallel tensor_model_parallel_size",
    ),
    ({**SEQUENCE_PARALLEL, "curriculum_seqlen": (8, 63, 9)}, "sequence-not-divisible"),
    (
        {**SEQUENCE_PARALLEL, "curriculum_seqlen": (9, 64, 9), "curriculum_seqlen_step": 3},
        "sequence-not-divisible: curriculum_seqlen_step sequence_parallel "
        "tensor_model_parallel_size",
    ),
    # DeepSpeed-Ulysses.
    ({**ULYSSES, SLICES: 3}, f"sequence-not-divisible: seq_length {SLICES}"),
    (
        {**ULYSSES, SLICES: 4, "curriculum_seqlen": (6, 64, 10), "curriculum_seqlen_step": 6},
        f"sequence-not-divisible: curriculum_seqlen_step {SLICES}",
    ),
    (
        {**ULYSSES, SLICES: 4, "curriculum_seqlen": (8, 62, 10)},
        f"sequence-not-divisible: curriculum_seqlen {SLICES}",
    ),
    ({SLICES: 2, **SEQUENCE_PARALLEL, "seq_length": 66}, "sequence-not-divisible"),
    ({**ULYSSES, SLICES: 8}, HEADS),
    # Three query heads of a rank, of two key-value heads: no whole number of queries for each.
    ({**ULYSSES, SLICES: 4, "num_query_groups": 6}, HEADS),
    (
        {**ULYSSES, SLICES: 4, "num_query_groups": 6, "tensor_model_parallel_size": 6},
        f"{HEADS}: num_attention_heads num_query_groups {SLICES}",
    ),
    ({SLICES: 2, "compile": True}, "sequence-parallelism-with-compile"),
    # Data, tokenizer, checkpoints and logging.
    ({"data_path": None}, "training-data-required"),
    ({"train_data_path": ("x",)}, "mutually-exclusive"),
    ({"data_args_path": "x"}, "mutually-exclusive"),
    ({**OWN_FILES, "per_split_data_args_path": "x"}, "mutually-exclusive:"),
    ({**OWN_FILES, "split": "1"}, "split-without-shared-data: split"),
    ({"vocab_size": 0}, "tokenizer-option-required"),
    ({"tokenizer_type": "HFTokenizer"}, "tokenizer-option-required"),
    ({**TIKTOKEN, "tiktoken_special_tokens": ("a", "a")}, "duplicate-special-token:"),
    ({**TIKTOKEN, "tiktoken_special_tokens": ("a",)}, "special-token-missing:"),
    ({**TIKTOKEN, "tiktoken_num_special_tokens": 2}, "too-few-special-token-ids:"),
    ({"load": "x/global_step3"}, "load-is-one-checkpoint"),
    ({"load": __file__}, "load-is-a-file"),
    ({"load": "x", "save": "y/../x", "finetune": True}, "new-run-in-the-same-folder"),
    ({"load": "x", "save": "x", "reset_iteration": True}, "new-run-in-the-same-folder"),
    (
        {"load": "x", "reset_iteration": True, "finetune": True},
        "mutually-exclusive: finetune reset_iteration",
    ),
    (
        {"load": "x", "load_tag": "global_step4", "ckpt_step": 4},
        "mutually-exclusive: ckpt_step load_tag",
    ),
    ({"load": "x", "load_tag": "best"}, "load-tag-of-no-checkpoint: load_tag"),
    ({"load": "x", **ADJUSTED}, f"mutually-exclusive: {' '.join(ADJUSTED)}"),
    ({"save": f"{__file__}/x"}, "not-a-folder"),
    ({"deepspeed_config": "no such file"}, "file-not-found"),
    ({"deepspeed_config": "/dev/null"}, "path-not-a-regular-file"),
    ({**BERT, "vocab_file": "/dev/null"}, "path-not-a-regular-file: vocab_file"),
    ({"metrics_jsonl": "/"}, "not-a-file"),
    ({"skip_train": True, "eval_iters": 0}, "nothing-to-evaluate"),
    # Precision and optimizer.
    ({"fp16": True, "bf16": True}, "mutually-exclusive"),
    ({"min_loss_scale": 1.5}, "min-loss-scale-not-an-integer"),
    ({"start_weight_decay": 0.5}, "constant-weight-decay-changes"),
    ({**LINEAR, "start_weight_decay": 0.1}, "weight-decay-bounds-required: start_weight_decay"),
    ({"min_lr": 2.0}, "learning-rate-exceeds-maximum"),
    *(
        ({"skip_train_iteration_range": ("1-5", entry)}, "malformed-iteration-range")
        for entry in ("", "x", "0-3", "5-4", "3-", "-3", "1-2-3")
    ),
    ({"min_lr": 0.2, "decoupled_lr": 0.1}, "learning-rate-exceeds-decoupled"),
    ({"decoupled_lr": 0.1, "decoupled_min_lr": 0.2}, "learning-rate-exceeds-decoupled"),
    ({"weight_decay": 0.0, "embedding_weight_decay": 0.2}, f"embedding-{DECAY}-without-{DECAY}"),
    ({"lr_warmup_samples": 4, "lr_warmup_init": 1.5}, "learning-rate-exceeds-maximum:"),
    # Run length and its unit.
    ({"train_samples": None}, "run-length-required"),
    ({"train_iters": 5}, "mutually-exclusive"),
    ({"train_samples": 3}, "run-shorter-than-one-batch"),
    ({"lr_decay_iters": 5}, "schedule-unit-differs-from-run"),
    ({"lr_warmup_fraction": 0.1, "lr_warmup_samples": 4}, "mutually-exclusive"),
    ({"lr_warmup_fraction": 0.1, "lr_warmup_tokens": 4}, "mutually-exclusive"),
    ({"lr_decay_samples": 7, "lr_decay_tokens": 9}, "mutually-exclusive"),
    # Warmup, decay and annealing.
    ({"lr_decay_samples": 500, "lr_warmup_samples": 500}, "warmup-not-shorter-than-decay"),
    ({"lr_decay_samples": 500, "lr_warmup_fraction": 1.0}, "warmup-not-shorter-than-decay"),
    ({**ITERATIONS, "lr_warmup_iters": 8}, "warmup-not-shorter-than-decay: lr_warmup_iters"),
    ({"lr_warmup_tokens": 90, "lr_decay_tokens": 90}, "warmup-not-shorter-than-decay"),
    ({"lr_warmup_samples": 2, "lr_decay_tokens": 90}, "warmup-not-shorter-than-decay"),
    (WSD, "wsd-decay-required: lr_wsd_decay_samples"),
    (
        {**WSD, "lr_decay_samples": 500, "lr_warmup_samples": 100, "lr_wsd_decay_samples": 401},
        "annealing-exceeds-decay: lr_wsd_decay_samples lr_decay_samples",
    ),
    ({**WSD, "lr_decay_tokens": 9, "lr_wsd_decay_tokens": 10}, "annealing-exceeds-decay:"),
    # Batch size.
    ({"global_batch_size": 10}, "batch-size-not-divisible"),
    ({"global_batch_size": 16, "rampup_batch_size": (4, 5, 100)}, "rampup-misses-final"),
    ({"global_batch_size": 16, "rampup_batch_size": (6, 2, 9)}, "batch-size-not-divisible:"),
    ({"global_batch_size": 16, "rampup_batch_size": (4, 2, 9)}, "batch-size-not-divisible:"),
    ({"global_batch_size": 16, "rampup_batch_size": (0, 4, 100)}, "rampup-not-positive:"),
    ({"global_batch_size": 16, "rampup_batch_size": (32, 4, 100)}, "rampup-start-exceeds-final"),
    ({"rampup_batch_size": (4, 4, 9)}, "rampup-requires-global-batch-size"),
    ({**ITERATIONS, "rampup_batch_size": (4, 4, 9)}, "batch-size-schedule-with-iterations:"),
    ({BATCH_SIZES: ("0:4 5X:4",)}, "malformed-batch-size-step"),
    ({BATCH_SIZES: ("0:4 7:0",)}, "malformed-batch-size-step"),
    ({BATCH_SIZES: ("0:4 0.0001K:4",)}, "malformed-batch-size-step"),
    ({BATCH_SIZES: ()}, "malformed-batch-size-step"),
    ({BATCH_SIZES: ("1K:4",)}, "first-batch-size-step-not-at-zero"),
    ({BATCH_SIZES: ("0:4 1M:4 1K:8",)}, "batch-size-steps-not-ascending"),
    ({BATCH_SIZES: ("0:4 10:6", "1M:8")}, "batch-size-not-divisible"),
    ({BATCH_SIZES: ("0:4",), "rampup_batch_size": (4, 4, 9)}, "mutually-exclusive"),
    ({BATCH_SIZES: ("0:4 1K:8",), "global_batch_size": 4}, "final-batch-size-differs"),
    ({**ITERATIONS, BATCH_SIZES: ("0:4",)}, "batch-size-schedule-with-iterations:"),
    (
        {**TOKENS, BATCH_SIZES: ("0:4 1K:8",), "lr_warmup_iters": 5},
        "iterations-with-changing-batch-size: lr_warmup_iters step_batch_size_schedule",
    ),
    # Curriculum.
    ({"curriculum_seqlen": (12, 64, 9)}, "curriculum-start-not-a-multiple"),
    ({"curriculum_seqlen": (64, 32, 9)}, "curriculum-descends"),
    ({"curriculum_seqlen": (8, 64, 0)}, "curriculum-not-positive"),
    ({"curriculum_seqlen": (8, 128, 9)}, "curriculum-exceeds-sequence"),
    (
        {**CURRICULUM, "lr_warmup_samples": 2, "lr_decay_tokens": 900},
        "curriculum-requires-tokens: lr_warmup_samples curriculum_seqlen",
    ),
    ({**CURRICULUM, "lr_warmup_tokens": 2}, "curriculum-requires-tokens: train_samples"),
    (
        {**CURRICULUM, **CONTIGUOUS},
        "mutually-exclusive: curriculum_seqlen contiguous_checkpointing",
    ),
]


@pytest.mark.parametrize(("changes", "expected"), CASES)
def test_contradiction_is_reported(changes, expected):
    """By a code with all fields that are set, or with the first fields after a colon.

    A colon alone stands for the last field that is set.
    """
    code, colon, names = expected.partition(":")
    found = problems(config_of(**changes))
    matching = fields(problem for problem in found if problem.code == code)
    if colon:
        first = tuple(names.split()) or tuple(changes)[-1:]
        assert any(each[: len(first)] == first for each in matching), codes(found)
    else:
        assert any(changes.keys() <= set(each) for each in matching), codes(found)


OPTIONS = [each for group in GROUPS.values() for each in option_fields(group)]


def test_every_value_out_of_its_range_is_reported():
    """docs/reference/flags.md has the ranges."""
    for item, spec in OPTIONS:
        # The value 0 of a size means that it is not given.
        low = None if spec.minimum is None else spec.minimum - (2 if item.default == 0 else 1)
        high = None if spec.maximum is None else spec.maximum + 1
        for value in (low, spec.above, high, spec.below):
            if value is not None:
                found = problems(config_of(**{item.name: (value,) if spec.nargs == "*" else value}))
                outcome = zip(codes(found), fields(found), strict=True)
                assert ("out-of-range", (item.name,)) in outcome, (item.name, value)


def test_required_options_are_reported_together():
    found = Config().problems(world_size=1)
    required = {"num_layers", "hidden_size", "num_attention_heads", "seq_length"}
    required |= {"micro_batch_size", "lr"}
    names = {problem.fields[0] for problem in found if problem.code == "required"}
    assert names == required
    assert {"training-data-required", "tokenizer-option-required"} <= set(codes(found))
    # A default that a flag requests is a value of its own.
    found = Config(given=frozenset({"num_layers"})).problems(world_size=1)
    assert ("out-of-range", ("num_layers",)) in zip(codes(found), fields(found), strict=True)


def test_numbers_that_are_not_finite_suppress_other_problems():
    config = config_of(lr=float("inf"), clip_grad=float("inf"), hidden_size=50)
    found = config.problems(1)
    assert codes(found) == ["not-finite", "not-finite"]
    assert fields(found) == [("lr",), ("clip_grad",)]


def test_tensor_parallel_size_must_divide_heads_groups_and_mlp():
    def found(tp_size: int, **changes: Any) -> dict[str, Problem]:
        problems = list(config_of(**changes).model.problems(tp_size))
        assert set(codes(problems)) == {"not-divisible-by-tensor-parallel-size"}
        return {problem.fields[0]: problem for problem in problems}

    sizes = found(4, ffn_hidden_size=90)
    assert set(sizes) == {"num_attention_heads", "ffn_hidden_size"}
    assert "(nearest: 4 or 8; " in sizes["num_attention_heads"]
    assert ": 1, 2, 3, 6)" in sizes["num_attention_heads"]
    groups = found(6, num_query_groups=2)["num_query_groups"]
    assert ": 1, 2)" in groups
    assert "(from --hidden-size 48)" in found(5)["ffn_hidden_size"]


BY_SLICES = "world-size-not-divisible-by-sequence-parallel-size"
BY_STAGES = "world-size-not-divisible-by-stages"


@pytest.mark.parametrize(
    ("sizes", "world_size", "expected"),
    [
        ((3, 1, 1), 4, {"world-size-not-divisible": "1, 2, 4; or start 3 or 6 processes"}),
        ((2, 4, 1), 12, {BY_STAGES: "stages: 1, 2, 3, 6; or start 8 or 16 processes"}),
        ((1, 1, 4), 18, {BY_SLICES: "that fit: 1, 2, 3, 6, 9, 18)"}),
        ((2, 2, 2), 6, {BY_SLICES: "", BY_STAGES: "stages: 1, 3; or start 4 or 8 processes"}),
        ((2, 2, 2), 6, {BY_SLICES: "", BY_STAGES: "of at least 2 ranks"}),
        # The sizes that are proposed fit the number of stages.
        ((2, 2, 4), 12, {BY_SLICES: "that fit: 1, 3)"}),
    ],
)
def test_sizes_must_divide_the_processes(sizes, world_size, expected):
    tp_size, pp_size, sp_size = sizes
    parallel = ParallelConfig(tp_size, pp_size, ds_sequence_parallel_size=sp_size)
    found = {problem.code: problem for problem in parallel.problems(world_size, num_layers=4)}
    assert found.keys() == expected.keys()
    assert all(text in found[code] for code, text in expected.items())


def test_ranks_that_share_sequences_have_no_samples_of_their_own():
    parallel = ParallelConfig(tensor_model_parallel_size=2, ds_sequence_parallel_size=4)
    assert [parallel.data_parallel_size(size) for size in (24, 20)] == [3, 0]


def test_batch_size_problem_shows_its_arithmetic():
    config = config_of(tensor_model_parallel_size=2, global_batch_size=10)
    (problem,) = problems(config)
    assert "--micro-batch-size 2 x data-parallel size 2 = 4" in problem
    assert "4 processes / --tensor-model-parallel-size 2 = 2" in problem
    assert "(nearest: 8 or 12)" in problem


LAST = {"train_samples": 35, "global_batch_size": 8}


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"train_samples": 32, "global_batch_size": 8}, None),
        (ITERATIONS, None),
        (LAST, "incomplete-last-batch"),
        ({**LAST, "rampup_batch_size": (4, 4, 10)}, "incomplete-last-batch"),
        ({"train_samples": 36, "curriculum_seqlen": (8, 64, 9)}, None),
        ({"train_samples": 36, "curriculum_seqlen": (8, 64, 18)}, "curriculum-not-completed"),
        ({"train_samples": 36, "curriculum_seqlen": (8, 48, 9)}, "curriculum-below-sequence"),
        ({"train_samples": 36, "train_tokens": 36 * 64 + 1}, "tokens-not-reached"),
        ({"train_samples": 38, "train_tokens": 36 * 64}, None),
        ({"train_samples": 36, BATCH_SIZES: ("0:4 2304:8",)}, "batch-size-not-reached"),
    ],
)
def test_unexpected_effect_of_a_valid_schedule_is_warned_of(changes, code):
    config = config_of(**changes)
    assert problems(config) == []
    found = list(schedule_validation.warnings(config, DP_SIZE))
    assert codes(found) == ([] if code is None else [code])


SGD = {"optimizer": "sgd"}
CONSTANT = {"lr_decay_style": "constant"}
PARTITIONED = {"partition_activations": True}
CONDITIONAL = {item.name: item.default for item, spec in OPTIONS if spec.only_with}
INEFFECTIVE: dict[str, list[tuple[Any, dict[str, Any]]]] = {
    **{name: [(not on, {})] for name, on in CONDITIONAL.items() if isinstance(on, bool)},
    "pp_partition_method": [("parameters", {})],
    "pipeline_schedule": [("dualpipev", {})],
    "rotary_percent": [(0.4, {})],
    "rotary_base": [(5.0, {})],
    "gelu_approximation": [("none", {"activation": "swiglu"})],
    "reset_position_ids": [(True, {"position_embedding_type": "alibi"})],
    "vocab_file": [("no such file", {})],
    "merge_file": [("no such file", {})],
    "tokenizer_model": [("no such file", {})],
    "vocab_extra_ids": [(3, {})],
    "tiktoken_pattern": [("v1", {})],
    "tiktoken_num_special_tokens": [(2, {})],
    "tiktoken_special_tokens": [(("a", "a"), {})],
    "adam_beta1": [(0.1, SGD)],
    "adam_beta2": [(0.1, SGD)],
    "adam_eps": [(1.0, SGD)],
    "lion_beta1": [(0.5, {})],
    "lion_beta2": [(0.5, SGD)],
    "muon_momentum": [(0.5, {})],
    "muon_num_ns_steps": [(3, SGD)],
    "muon_scale_mode": [("unit_rms_norm", {})],
    "muon_extra_scale_factor": [(1.0, {})],
    "use_bnb_optimizer": [(True, SGD)],
    "sgd_momentum": [(0.5, {})],
    "decoupled_min_lr": [(2.0, {})],
    "curriculum_seqlen_step": [(5, {})],
    "skip_loss_spikes_window": [(5, {})],
    "lr_warmup_init": [(2.0, {}), (2.0, {"lr_warmup_samples": 0})],
    "min_lr": [(2.0, CONSTANT)],
    "lr_wsd_decay_style": [("linear", {})],
    "lr_wsd_decay_iters": [(5, {}), (5, {"lr_wsd_decay_samples": 5})],
    "lr_wsd_decay_samples": [(5000, {}), (5, {**CURRICULUM, "lr_decay_tokens": 900})],
    "lr_wsd_decay_tokens": [(10**9, {})],
    "loss_scale": [(1.0, {}), (1.0, {"bf16": True})],
    "initial_loss_scale": [(3.0, {}), (3.0, {"fp16": True, "loss_scale": 1.0})],
    "min_loss_scale": [(2.0, {})],
    "loss_scale_window": [(7, {})],
    "hysteresis": [(3, {}), (3, {"fp16": True, "loss_scale": 1.0})],
    "allow_fp16_on_cpu": [(True, {"bf16": True})],
    "save_interval": [(5, {}), (5, {"load": "x"})],
    "save_interval_minutes": [(5.0, {"load": "x"})],
    "async_save": [(True, {"load": "x"})],
    "keep_last": [(1, {})],
    "keep_every": [(100, {"save": "x"})],
    "local_checkpoint_dir": [("x", {}), ("x", {"load": "x"})],
    "local_save_interval": [(5, {"save": "x"})],
    "ckpt_step": [(5, {}), (5, {"save": "x"})],
    "load_tag": [("global_step5", {})],
    "no_save_optim": [(True, {}), (True, {"load": "x"})],
    "checkpoint_num_layers": [(99, {}), (99, {"recompute_granularity": "selective"})],
    "checkpoint_in_cpu": [(True, {}), (True, FULL), (True, PARTITIONED)],
    "contiguous_checkpointing": [
        (True, CURRICULUM),
        (True, {**FULL, **CURRICULUM}),
        (True, PARTITIONED),
    ],
    "synchronize_each_layer": [(True, {}), (True, FULL), (True, PARTITIONED)],
    "profile_backward": [(True, FULL)],
    "optimizer_offload_fraction": [(0.5, {"zero_stage": 3}), (0.5, {"cpu_optimizer": True})],
    "nvme_path": [("/tmp", {})],
    "zero_hpz_partition_size": [(2, {}), (2, {"zero_stage": 2})],
    "remote_device": [("cpu", {}), ("nvme", {"zero_stage": 2, "log_params_norm": True})],
    "expert_interval": [(3, {})],
    "moe_router_topk": [(3, {})],
    "moe_router_load_balancing_type": [("none", {})],
    "moe_aux_loss_coeff": [(0.1, {}), (0.1, {**EXPERTS, "moe_router_load_balancing_type": "none"})],
    "moe_z_loss_coeff": [(0.1, {})],
    "moe_expert_capacity_factor": [(1.0, {}), (1.0, {**EXPERTS, "moe_token_dropping": False})],
    "moe_eval_capacity_factor": [(1.0, {}), (1.0, {**EXPERTS, "moe_token_dropping": False})],
    "moe_min_capacity": [(4, {}), (4, {**EXPERTS, "moe_token_dropping": False})],
    "moe_token_drop_policy": [("position", {})],
    "tensorboard_queue_size": [(5, {})],
    "tensorboard_log_interval": [(5, {})],
}
"""By field, values and other settings next to which they have no effect. The values contradict the
other settings where they can."""


@pytest.mark.parametrize(
    ("name", "value", "others"),
    [(name, *case) for name, cases in INEFFECTIVE.items() for case in cases],
)
def test_flag_without_effect_is_a_warning_and_no_error(
    name: str, value: Any, others: dict[str, Any]
) -> None:
    config = dataclasses.replace(
        config_of(**{name: value, **others}), given=frozenset({name, *others})
    )
    assert [*problems(config), *merge_file(config, DP_SIZE)[1]] == []
    found = [warning for warning in config.warnings() if name in warning.fields]
    assert codes(found) == ["no-effect"]


def test_a_condition_names_the_flags_that_are_missing_or_in_the_way() -> None:
    groups = [(group, each) for group in GROUPS.values() for each in option_fields(group)]
    for group, (_, spec) in groups:
        for condition in spec.conditions:
            values = [value for each in condition.admitted.values() for value in each]
            if all(value is None or isinstance(value, bool) for value in values):
                assert condition.without_flags == condition.holds(group), condition


def test_every_conditional_flag_has_a_case_without_effect() -> None:
    assert CONDITIONAL.keys() == INEFFECTIVE.keys()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"loss_scale": 1.0, "hysteresis": 3}, [("loss_scale", "hysteresis")]),
        ({"fp16": True, "hysteresis": 3}, []),
        ({"accumulate_allreduce_grads_in_fp32": False, "bf16": True}, []),
        ({**ROPE, "rotary_base": 5.0, "reset_position_ids": True}, []),
        ({"add_qkv_bias": True, "add_bias_linear": False}, []),
        ({"log_memory_to_tensorboard": True, "tensorboard_dir": "x"}, []),
        ({"save": "x", "save_interval": 2, "keep_last": 1}, []),
        ({"lr_warmup_init": 0.5, "lr_warmup_fraction": 0.1}, []),
        ({**FULL, **PARTITIONED, "contiguous_checkpointing": True, "profile_backward": True}, []),
        ({"zero_stage": 3, "remote_device": "cpu"}, []),
        ({"split": "1"}, []),
        ({"data_path": None, "per_split_data_args_path": "x", "split": "1"}, [("split",)]),
        ({**OWN_FILES, "valid_data_path": ("x",), "split": "1"}, [("split",)]),
    ],
)
def test_only_flags_without_effect_are_warned_of(
    changes: dict[str, Any], expected: list[tuple[str, ...]]
) -> None:
    config = dataclasses.replace(config_of(**changes), given=frozenset(changes))
    assert problems(config) == []
    assert fields(config.warnings()) == expected


def test_schedule_checks_accept_an_incomplete_configuration():
    assert list(schedule_validation.problems(Config(), 1)) == []
    assert list(schedule_validation.problems(config_of(train_samples=0), 0)) == []
