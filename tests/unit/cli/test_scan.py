"""Reading a command line: spellings, values, and every problem at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.cli.arguments import build_config
from megatron_ds.cli.flags import training_flags
from megatron_ds.cli.scan import ParsedLine, scan
from megatron_ds.config import Config
from tests.problems import codes, fields


def config_of(line: str) -> Config:
    return build_config(line.split(), world_size=1, warn=lambda _: None)[0]


def scan_of(line: str) -> ParsedLine:
    return scan(line.split(), training_flags())


GROUPED = "--train-samples 10_000 --rampup-batch-size 2 2 1_000"
SIGNED = "--lr 1e-4 --seed -1 --min-lr=-.5"
CHOICES = "--position-embedding-type rotary --normalization rmsnorm"
ROPE, NO_POSITION = "--use-rotary-position-embeddings", "--no-position-embedding"
EXPERTS = {"num_experts": (4, 2), "expert_model_parallel_size": 2}
WIDTH = "--hidden-size 96 --glu-activation geglu"
ZERO_EXITS = {"exit_interval": None, "exit_duration_in_mins": None}
VALID: list[tuple[str, dict[str, Any]]] = [
    ("--num-layers 3", {"num_layers": 3}),
    ("--num_layers 3", {"num_layers": 3}),
    ("--num_layers=3", {"num_layers": 3}),
    # Numbers may be grouped, signed, or have an exponent.
    (GROUPED, {"train_samples": 10000, "rampup_batch_size": (2, 2, 1000)}),
    ("--seq-length 1e3 --loss-scale-window 500.0", {"seq_length": 1000, "loss_scale_window": 500}),
    (SIGNED, {"lr": 1e-4, "seed": -1, "min_lr": -0.5}),
    # Aliases and other spellings.
    ("--num-key-value-heads 2", {"num_query_groups": 2}),
    ("--layernorm-epsilon 1e-6", {"norm_epsilon": 1e-6}),
    ("--rotary-position-embeddings-theta 5e5", {"rotary_base": 5e5}),
    (CHOICES, {"position_embedding_type": "rope", "normalization": "RMSNorm"}),
    ("--tokenizer-type PretrainedFromHF", {"tokenizer_type": "HFTokenizer"}),
    ("--disable-bias-linear", {"add_bias_linear": False}),
    # --no-position-embedding yields to other positions.
    (ROPE, {"position_embedding_type": "rope"}),
    (NO_POSITION, {"position_embedding_type": "none"}),
    (f"{NO_POSITION} {ROPE}", {"position_embedding_type": "rope"}),
    (f"{ROPE} {NO_POSITION}", {"position_embedding_type": "rope"}),
    (f"{NO_POSITION} --position-embedding-type alibi", {"position_embedding_type": "alibi"}),
    (f"--position-embedding-type none {NO_POSITION}", {"position_embedding_type": "none"}),
    # Two flags with the same value agree.
    ("--swiglu --activation swiglu", {"activation": "swiglu"}),
    ("--batch-size 2 --micro-batch-size 2", {"micro_batch_size": 2}),
    # The switch of gelu's kernel has no effect on other activations.
    ("--no-bias-gelu-fusion", {"gelu_approximation": "none"}),
    ("--no-bias-gelu-fusion --swiglu", {"activation": "swiglu"}),
    # --glu-activation keeps the width of its fork.
    (WIDTH, {"hidden_size": 96, "activation": "geglu", "ffn_hidden_size": 384}),
    (
        f"{WIDTH} --ffn-hidden-size 8",
        {"hidden_size": 96, "activation": "geglu", "ffn_hidden_size": 8},
    ),
    # Refused flags are accepted where they request what is done.
    ("--num-experts 4 2 --expert-model-parallel-size 2", EXPERTS),
    ("--dataloader-type single", {}),
    (
        "--context-parallel-size 2 --cp-comm-type a2a",
        {"ds_sequence_parallel_size": 2, "cp_comm_type": "a2a"},
    ),
    ("--head-lr-mult 1.0 --recompute-method uniform", {}),
    ("--attention-softmax-in-fp32 --exit-signal-handler", {}),
    ("--activations-checkpoint-method uniform", {"recompute_granularity": "full"}),
    (
        "--activations-checkpoint-method block --activations-checkpoint-num-layers 2",
        {"recompute_granularity": "full", "checkpoint_num_layers": 2},
    ),
    ("--grad-reduce-in-bf16", {"accumulate_allreduce_grads_in_fp32": False}),
    ("--no-pad-vocab-size", {"make_vocab_size_divisible_by": 1}),
    # Peers test the truth of these.
    ("--exit-interval 0 --exit-duration-in-mins 0", ZERO_EXITS),
    ("--loss-scale 0 --save-interval 0", {"loss_scale": None, "save_interval": None}),
    ("--train-samples 0 --eval-interval 0", {"train_samples": None, "eval_interval": None}),
]


@pytest.mark.parametrize(("line", "values"), VALID)
def test_valid_line_gives_values_without_a_word(line: str, values: dict[str, Any]) -> None:
    found = scan_of(line)
    assert found.values == values
    assert list(map(type, found.values.values())) == list(map(type, values.values()))
    assert found.problems == found.warnings == []


MICROSOFT = {
    "expert_interval": 2,
    "moe_router_topk": 1,
    "moe_aux_loss_coeff": 0.1,
    "moe_expert_capacity_factor": 1.0,
    "moe_eval_capacity_factor": 1.0,
    "moe_min_capacity": 4,
}


@pytest.mark.parametrize(
    ("line", "implied"),
    [
        ("--num-experts 8 --moe-expert-parallel-size 2", MICROSOFT),
        ("--num-experts 8 --create-moe-param-group", MICROSOFT),
        ("--num-experts 8 --topk 2", {k: v for k, v in MICROSOFT.items() if "topk" not in k}),
        ("--num-experts 1 --topk 2", {}),
        ("--moe-loss-coeff 0.01", {}),
        ("--num-experts 8 --moe-router-topk 2 --expert-interval 2 --moe-aux-loss-coeff 0.1", {}),
    ],
)
def test_spellings_of_one_fork_select_its_defaults(line: str, implied: dict[str, Any]) -> None:
    found = scan_of(line)
    assert found.implied == implied
    assert found.values.keys().isdisjoint(implied)
    warned = [each for each in found.warnings if each.code == "implied-defaults"]
    assert len(warned) == bool(implied)
    if "expert_interval" in implied:
        assert "--expert-interval 2 (else 1)" in str(warned[0])
    if "moe_router_topk" in implied:
        assert "--moe-router-topk 1 (else 2)" in str(warned[0])


def test_a_family_of_flags_is_ignored_by_the_beginning_of_their_names() -> None:
    found = scan_of("--inference-max-requests 8 --inference-dynamic-batching --rl-x 1 2 --lr 1")
    assert (found.values, found.problems) == ({"lr": 1.0}, [])
    assert codes(found.warnings) == ["ignored-flag"]
    assert "unknown-flag" in codes(scan_of("--inferenc 8").problems)


BIAS = "accumulate-allreduce-grads-in-fp32"
INVALID = [
    *(
        (f"--num-layers {value}", "not-an-integer", "num_layers", f"--num-layers {value}")
        for value in ("two", "1.5", "1e99", "nan", "inf", "1__0", "0x10", "1,000")
    ),
    ("--lr fast", "not-a-number", "lr", "--lr fast"),
    ("--save=", "empty-value", "save", "--save"),
    ("--num-layers --fp16", "flag-needs-a-value", "num_layers", "--num-layers"),
    ("--data-path", "flag-needs-a-value", "data_path", "--data-path"),
    ("--rampup-batch-size 2 2", "flag-needs-a-value", "rampup_batch_size", "3 values, not 2"),
    ("--tokenizer-type Llama3Tokenizer", "unsupported-value", "tokenizer_type", "Llama3Tokenizer"),
    ("--lr-decay-style Cosin", "invalid-choice", "lr_decay_style", "cosine?"),
    ("--swiglu --activation gelu", "contradicting-flags", "activation", "--swiglu and --activ"),
    ("--micro-batch-size 2 --batch-size 4", "contradicting-flags", "micro_batch_size", "2 and --b"),
    (f"--no-{BIAS} --{BIAS}", "contradicting-flags", BIAS.replace("-", "_"), f"no-{BIAS} and --a"),
    (
        f"{NO_POSITION} --position-embedding-type learned_absolute",
        "contradicting-flags",
        "position_embedding_type",
        f"learned_absolute and {NO_POSITION}",
    ),
    ("--use-torch-compile=0", "unknown-flag", "", "leave it out"),
    ("--fp16 False", "unexpected-argument", "", "leave it out to switch it off"),
    ("--tokenizer-file x", "unknown-flag", "", "--tokenizer-model?"),
    ("--data-file-list x", "unknown-flag", "", "--data-args-path?"),
    ("--reset-progress", "unknown-flag", "", "--finetune?"),
    ("--no-train", "unknown-flag", "", "--skip-train?"),
    ("--wandb-entity-name x", "unknown-flag", "", "--wandb-project"),
    ("--attention-head-type multiquery", "unknown-flag", "", "--num-query-groups 1"),
    ("--verify-checkpoint", "unknown-flag", "", "leave the flag out"),
    ("--optimizer fusedadamw", "unsupported-value", "optimizer", "use adam"),
    # Of an unknown flag, the nearest option is shown.
    ("--num-layerz 3", "unknown-flag", "", "--num-layers"),
    ("--num_layerz 3", "unknown-flag", "", "--num-layers"),
    ("--tensor-parallel-size 3", "unknown-flag", "", "--tensor-model-parallel-size"),
    ("--sequence-paralel 3", "unknown-flag", "", "--sequence-parallel"),
    ("--warmup-fraction 3", "unknown-flag", "", "--lr-warmup-fraction"),
    ("-lr 3", "unknown-flag", "", "--lr"),
    ("--qqqqqqqqqq 3", "unknown-flag", "", "--help"),
    # A refused flag shows its values and the alternative.
    ("--warmup 5", "unsupported-flag", "", "--warmup 5 "),
    ("--warmup 5", "unsupported-flag", "", "--lr-warmup-samples"),
    ("--mlp-type residual", "unsupported-flag", "", "--mlp-type residual"),
    ("--dataloader-type cyclic", "unsupported-flag", "", "cyclic"),
    ("stray --num-layers 2", "unexpected-argument", "", "'stray'"),
    ("--num-layers 2 stray", "unexpected-argument", "", "'stray'"),
    ("--fp16 true", "unexpected-argument", "", "'true'"),
    ("--fp16=true", "unexpected-argument", "", "'true'"),
]


@pytest.mark.parametrize(("line", "code", "name", "shown"), INVALID)
def test_invalid_line_is_reported_with_field_and_value(
    line: str, code: str, name: str, shown: str
) -> None:
    (problem,) = scan_of(line).problems
    assert (problem.code, " ".join(problem.fields)) == (code, name)
    assert shown in str(problem)


def test_the_given_fields_are_recorded() -> None:
    given = config_of("--num-layers 2 --swiglu --use-flash-attn").given
    assert given == {"num_layers", "activation"}


def test_the_last_of_a_repeated_flag_applies_with_a_warning() -> None:
    line = scan_of("--lr 1e-3 --num-layers 2 --lr 2e-3 --num_layers 2")
    assert line.values == {"lr": 2e-3, "num_layers": 2}
    assert codes(line.warnings) == ["repeated-flag"]
    assert fields(line.warnings) == [("lr",)]
    assert line.problems == []


def test_flags_without_effect_are_warnings_by_reason() -> None:
    line = scan_of(
        "--use-flash-attn --DDP-impl local --log-level info --logging-level 20 "
        "--recompute-method block"
    )
    assert codes(line.warnings) == ["ignored-flag"] * 4
    assert "--log-level, --logging-level" in str(line.warnings[2])
    assert (line.values, line.problems) == ({}, [])


@pytest.mark.parametrize("argument", ["\u2013\u2013num-workers", "\u2014lr", " "])
def test_dashes_and_escaped_spaces_are_explained(argument: str) -> None:
    def found(word: str) -> str:
        (problem,) = scan(["--lr", "1", word], training_flags()).problems
        assert problem.code == "unexpected-argument"
        return str(problem).replace(repr(word), "")

    assert found(argument) != found("word")


def test_all_problems_of_a_line_are_reported_at_once() -> None:
    """Claim (command-line): all errors of a command line are reported at once"""
    line = scan_of(
        "--num-layers two --lr-decay-style cos --hiden-size 8 --ds-sequence-parallel-fpdt --bf16 "
        "--micro-batch-size 2 --batch-size 4 --num-attention-heads 2.5 --hidden-size 9 --fp16 yes "
        "--seq-length 16 --weight-decay"
    )
    assert sorted(codes(line.problems)) == [
        "contradicting-flags",
        "flag-needs-a-value",
        "invalid-choice",
        "not-an-integer",
        "not-an-integer",
        "unexpected-argument",
        "unknown-flag",
        "unsupported-flag",
    ]


VALUES = ("0", "-1", "2", "1e3", "nan", "inf", "", "1__0", "9" * 5000, "x", "-", "--", "\0", "é")


@given(
    flags=st.lists(st.sampled_from(sorted(training_flags().by_name)), max_size=4),
    values=st.lists(st.sampled_from(VALUES), min_size=8, max_size=8),
)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_every_line_gives_a_configuration_and_problems(flags: list[str], values: list[str]) -> None:
    line = [word for pair in zip(flags, values, strict=False) for word in (f"--{pair[0]}", pair[1])]
    config, _ = build_config([*line, *values[4:6]], world_size=2, warn=lambda _: None)
    assert isinstance(config, Config)
