"""The configuration names every contradiction at once, in the user's words."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ds.config import (
    GROUPS,
    Config,
    LoggingConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RecomputeConfig,
    ScheduleConfig,
    flag_of,
)

MODEL = ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=6, seq_length=16)


def model_problems(tp_size: int = 1, **changes: object) -> str:
    return "\n".join(dataclasses.replace(MODEL, **changes).problems(tp_size))


def schedule_problems(dp_size: int = 2, **fields: object) -> str:
    fields = {"micro_batch_size": 2, "train_samples": 1000, **fields}
    return "\n".join(ScheduleConfig(**fields).problems(dp_size))


def test_a_sound_model_has_no_problem():
    assert model_problems() == ""
    assert model_problems(tp_size=2, num_query_groups=2) == ""


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": None}, "--num-layers is required"),
        ({"hidden_size": 50}, "--hidden-size 50 is not divisible by --num-attention-heads 6"),
        ({"num_query_groups": 4}, "6 is not divisible by --num-query-groups 4"),
        ({"group_query_attention": True}, "needs --num-query-groups"),
        ({"kv_channels": -4}, "--kv-channels -4: must be positive"),
        ({"num_query_groups": -2}, "--num-query-groups -2: must be positive"),
        ({"norm_epsilon": 0.0}, "--norm-epsilon 0.0: must be positive"),
        ({"attention_dropout": 1.0}, "--attention-dropout 1.0"),
        ({"max_position_embeddings": 8}, "--seq-length 16 exceeds --max-position-embeddings 8"),
        (
            {"position_embedding_type": "rope", "rotary_percent": 0.4},
            "rope rotates pairs: head size 8 x --rotary-percent 0.4 = 3",
        ),
    ],
)
def test_a_contradiction_in_the_model_is_named(changes, words):
    assert words in model_problems(**changes)


def test_what_tensor_parallelism_must_divide_is_named():
    words = model_problems(tp_size=4, ffn_hidden_size=90)
    assert "--num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4" in words
    assert "(nearest: 4 or 8; tensor-parallel sizes that fit this model: 1, 2, 3, 6)" in words
    assert "--num-query-groups" not in words
    assert "--ffn-hidden-size 90 is not divisible" in words
    groups = model_problems(tp_size=6, num_query_groups=2)
    assert "--num-query-groups 2 is not divisible by --tensor-model-parallel-size 6" in groups
    assert "tensor-parallel sizes that fit this model: 1, 2" in groups
    derived = model_problems(tp_size=5)
    assert "--ffn-hidden-size 192 (from --hidden-size 48) is not divisible" in derived


def test_all_problems_come_together():
    problems = Config().problems(world_size=1)
    for flag in ("--num-layers", "--lr", "--data-path", "--vocab-file", "--micro-batch-size"):
        assert any(flag in problem for problem in problems)


def test_batch_arithmetic_is_spelled_out():
    words = schedule_problems(global_batch_size=10)
    assert "--global-batch-size 10 is not divisible by --micro-batch-size 2" in words
    assert "data-parallel size 2 = 4 (nearest: 8 or 12)" in words
    config = Config(
        parallel=ParallelConfig(tensor_model_parallel_size=4),
        schedule=ScheduleConfig(micro_batch_size=2, global_batch_size=10, train_iters=1),
    )
    assert (
        "--global-batch-size 10 is not divisible by --micro-batch-size 2 x data-parallel size 2 = "
        "4, with data-parallel size = 8 processes / --tensor-model-parallel-size 4 = 2 (nearest: 8 "
        "or 12)"
    ) in config.problems(world_size=8)


@pytest.mark.parametrize(
    ("rampup", "words"),
    [
        ((4, 4, 100), ""),
        ((4, 5, 100), "the batch never is --global-batch-size 16 (nearest: 14 or 19)"),
        ((6, 2, 100), "the batch of 6 (stage 1 of 6) is not divisible"),
        ((4, 2, 100), "the batch of 6 (stage 2 of 7) is not divisible"),
        ((0, 4, 100), "must be positive"),
        ((32, 4, 100), "its first batch 32 is above --global-batch-size 16"),
    ],
)
def test_every_step_of_the_ramp_up_is_checked(rampup, words):
    problems = schedule_problems(global_batch_size=16, rampup_batch_size=rampup)
    assert words in problems
    assert bool(words) == bool(problems)


def test_the_units_of_the_schedule_do_not_mix():
    decay = schedule_problems(lr_decay_iters=5)
    assert "--lr-decay-iters 5 cannot go with --train-samples" in decay
    both = schedule_problems(lr_warmup_fraction=0.1, lr_warmup_samples=4)
    assert "--lr-warmup-fraction 0.1 and --lr-warmup-samples 4 exclude each other" in both
    assert "exclude each other" in schedule_problems(train_iters=5)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"checkpoint_activations": True}, ""),
        ({"checkpoint_activations": True, "deepspeed_activation_checkpointing": True}, ""),
        ({"deepspeed_activation_checkpointing": True}, "needs --checkpoint-activations"),
        ({"partition_activations": True}, "--partition-activations needs --checkpoint-activations"),
        ({"checkpoint_num_layers": 2}, "--checkpoint-num-layers 2 needs --checkpoint-activations"),
        (
            {"recompute_granularity": "full", "recompute_activations": True},
            "contradicts --recompute-activations",
        ),
        (
            {"checkpoint_activations": True, "recompute_granularity": "selective"},
            "contradicts --recompute-granularity selective",
        ),
        (
            {"checkpoint_activations": True, "profile_backward": True},
            "--profile-backward needs --deepspeed-activation-checkpointing",
        ),
        (
            {"checkpoint_activations": True, "checkpoint_in_cpu": True},
            "--checkpoint-in-cpu needs --partition-activations",
        ),
    ],
)
def test_recomputation_flags_that_would_do_nothing_are_named(fields, words):
    problems = "\n".join(RecomputeConfig(**fields).problems())
    assert words in problems
    assert bool(words) == bool(problems)


def test_numbers_out_of_range_are_named():
    assert any("--adam-beta2 7" in line for line in OptimizerConfig(adam_beta2=7).problems())
    assert any(
        "--min-loss-scale 0.5" in line for line in PrecisionConfig(min_loss_scale=0.5).problems()
    )
    logging = LoggingConfig(exit_duration_in_mins=-1)
    assert any("--exit-duration-in-mins -1" in line for line in logging.problems())
    config = Config(optimizer=OptimizerConfig(lr=float("nan"), clip_grad=float("inf")))
    assert config.problems(1) == [
        "--lr nan: must be a finite number",
        "--clip-grad inf: must be a finite number",
    ]


def test_the_world_must_be_divisible():
    problems = list(ParallelConfig(tensor_model_parallel_size=3).problems(world_size=4))
    assert problems == [
        "--tensor-model-parallel-size 3 does not divide the 4 processes of this run (valid: 1, 2, "
        "4; or start 3 or 6 processes)"
    ]


@pytest.mark.parametrize(("vocab", "tp"), [(50257, 1), (50257, 2), (50257, 4), (50257, 8)])
def test_the_padded_vocabulary_does_not_depend_on_the_layout(vocab, tp):
    assert dataclasses.replace(MODEL, vocab_size=vocab).padded_vocab(tp) == 50304


def test_the_padded_vocabulary_is_divisible_by_an_odd_layout():
    assert dataclasses.replace(MODEL, vocab_size=100).padded_vocab(3) == 384


def test_sizes_left_out_follow_the_rules():
    swiglu = ModelConfig(hidden_size=1024, num_attention_heads=16, activation="swiglu")
    assert swiglu.ffn == 2688
    assert dataclasses.replace(swiglu, activation="geglu").ffn == 4096
    assert swiglu.head_dim == 64
    assert swiglu.kv_heads == 16


def test_every_field_has_one_flag_of_its_own():
    flags = [flag_of(item.name) for group in GROUPS.values() for item in dataclasses.fields(group)]
    assert len(flags) == len(set(flags))
    assert flag_of("add_bias_linear") == "--disable-bias-linear"
    assert flag_of("deepspeed_config") == "--deepspeed_config"
