"""Reading a command line: spellings, values, and every problem at once."""

from __future__ import annotations

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


def scan_of(*line: str) -> ParsedLine:
    words = line[0].split() if len(line) == 1 else line
    return scan(words, training_flags())


@pytest.mark.parametrize("line", ["--num-layers 3", "--num_layers 3", "--num_layers=3"])
def test_dashes_underscores_and_equals_signs_are_the_same(line: str) -> None:
    assert scan_of(line).values == {"num_layers": 3}


def test_numbers_may_be_grouped_or_have_an_exponent() -> None:
    line = scan_of(
        "--train-samples 10_000 --rampup-batch-size 2 2 1_000 --seq-length 1e3 "
        "--loss-scale-window 500.0 --lr 1e-4 --seed -1 --min-lr=-.5"
    )
    assert line.values == {
        "train_samples": 10000,
        "rampup_batch_size": (2, 2, 1000),
        "seq_length": 1000,
        "loss_scale_window": 500,
        "lr": 1e-4,
        "seed": -1,
        "min_lr": -0.5,
    }
    assert isinstance(line.values["seq_length"], int)


@pytest.mark.parametrize("value", ["two", "1.5", "1e99", "nan", "inf", "1__0", "0x10", "1,000"])
def test_rejects_a_value_that_is_not_an_integer(value: str) -> None:
    (problem,) = scan_of(f"--num-layers {value}").problems
    assert (problem.code, problem.fields) == ("not-an-integer", ("num_layers",))
    assert f"--num-layers {value}" in problem


@pytest.mark.parametrize(
    ("line", "code", "field"),
    [
        (["--lr", "fast"], "not-a-number", "lr"),
        (["--save", ""], "empty-value", "save"),
        (["--lr="], "empty-value", "lr"),
        (["--num-layers", "--fp16"], "flag-needs-a-value", "num_layers"),
        (["--data-path"], "flag-needs-a-value", "data_path"),
        (["--rampup-batch-size", "2", "2"], "flag-needs-a-value", "rampup_batch_size"),
        (["--tokenizer-type", "Llama3Tokenizer"], "unsupported-value", "tokenizer_type"),
        (["--lr-decay-style", "Cosin"], "invalid-choice", "lr_decay_style"),
    ],
)
def test_rejects_an_invalid_value(line: list[str], code: str, field: str) -> None:
    (problem,) = scan(line, training_flags()).problems
    assert (problem.code, problem.fields) == (code, (field,))


def test_a_misspelt_choice_gets_the_nearest() -> None:
    assert scan_of("--lr-decay-style Cosin").problems[0].endswith("cosine?")


def test_aliases_set_the_same_field() -> None:
    config = config_of(
        "--num-key-value-heads 2 --layernorm-epsilon 1e-6 --rotary-position-embeddings-theta 5e5 "
        "--position-embedding-type rotary --normalization rmsnorm --tokenizer-type PretrainedFromHF"
    )
    assert config.model.num_query_groups == 2
    assert config.model.norm_epsilon == 1e-6
    assert config.model.rotary_base == 5e5
    assert config.model.position_embedding_type == "rope"
    assert config.model.normalization == "RMSNorm"
    assert config.tokenizer.tokenizer_type == "HFTokenizer"


def test_switches_turn_off_what_is_on_by_default() -> None:
    assert config_of("--disable-bias-linear").model.add_bias_linear is False
    assert config_of("").model.add_bias_linear is True


def test_the_given_fields_are_recorded() -> None:
    assert config_of("--num-layers 2 --swiglu --use-flash-attn").given == {
        "num_layers",
        "activation",
    }


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("--use-rotary-position-embeddings", "rope"),
        ("--no-position-embedding", "none"),
        ("--no-position-embedding --use-rotary-position-embeddings", "rope"),
        ("--use-rotary-position-embeddings --no-position-embedding", "rope"),
        ("--no-position-embedding --position-embedding-type alibi", "alibi"),
        ("--position-embedding-type none --no-position-embedding", "none"),
    ],
)
def test_no_position_embedding_yields_to_other_positions(line: str, kind: str) -> None:
    found = scan_of(line)
    assert found.values == {"position_embedding_type": kind}
    assert found.problems == []


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("--swiglu --activation gelu", "activation"),
        ("--micro-batch-size 2 --batch-size 4", "micro_batch_size"),
        (
            "--no-position-embedding --position-embedding-type learned_absolute",
            "position_embedding_type",
        ),
        (
            "--no-accumulate-allreduce-grads-in-fp32 --accumulate-allreduce-grads-in-fp32",
            "accumulate_allreduce_grads_in_fp32",
        ),
    ],
)
def test_rejects_two_flags_with_different_values_for_one_field(line: str, field: str) -> None:
    (problem,) = scan_of(line).problems
    assert (problem.code, problem.fields) == ("contradicting-flags", (field,))
    assert all(word in problem for word in line.split())


def test_two_flags_with_the_same_value_agree() -> None:
    line = scan_of("--swiglu --activation swiglu --batch-size 2 --micro-batch-size 2")
    assert line.problems == []


def test_the_last_of_a_repeated_flag_applies_with_a_warning() -> None:
    line = scan_of("--lr 1e-3 --num-layers 2 --lr 2e-3 --num_layers 2")
    assert line.values == {"lr": 2e-3, "num_layers": 2}
    assert codes(line.warnings) == ["repeated-flag"]
    assert fields(line.warnings) == [("lr",)]
    assert line.problems == []


def test_glu_activation_keeps_the_width_of_its_fork() -> None:
    assert config_of("--hidden-size 96 --glu-activation swiglu").model.mlp_hidden_size == 384
    assert config_of("--hidden-size 96 --swiglu").model.mlp_hidden_size == 256
    assert (
        config_of(
            "--hidden-size 96 --ffn-hidden-size 8 --glu-activation geglu"
        ).model.mlp_hidden_size
        == 8
    )


def test_switch_of_the_gelu_kernel_has_no_effect_on_other_activations() -> None:
    assert scan_of("--no-bias-gelu-fusion --swiglu").values == {"activation": "swiglu"}
    assert scan_of("--no-bias-gelu-fusion").values == {"gelu_approximation": "none"}


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("--num-layerz", "--num-layers"),
        ("--num_layerz", "--num-layers"),
        ("--tensor-parallel-size", "--tensor-model-parallel-size"),
        ("--sequence-paralel", "--sequence-parallel"),
        ("--warmup-fraction", "--lr-warmup-fraction"),
        ("-lr", "--lr"),
        ("--qqqqqqqqqq", "--help"),
    ],
)
def test_an_unknown_flag_gets_the_nearest_name(wrong: str, right: str) -> None:
    """Of a flag of this package, or of the peers."""
    (problem,) = scan_of(f"{wrong} 3").problems
    assert problem.code == "unknown-flag"
    assert wrong in problem
    assert right in problem


def test_a_refused_flag_names_its_values_and_the_alternative() -> None:
    problems = scan_of("--warmup 5 --skip-train-iteration-range 1-2 5-7").problems
    assert codes(problems) == ["unsupported-flag"] * 2
    assert "--warmup 5" in problems[0]
    assert "--lr-warmup-samples" in problems[0]
    assert "--skip-train-iteration-range 1-2 5-7" in problems[1]


def test_a_refused_flag_is_accepted_where_it_requests_what_is_done() -> None:
    line = scan_of(
        "--num-experts 1 --context-parallel-size 1 --dataloader-type single --head-lr-mult 1.0 "
        "--recompute-method uniform --attention-softmax-in-fp32 --exit-signal-handler"
    )
    assert line.problems == line.warnings == []
    assert len(scan_of("--num-experts 1 2 --dataloader-type cyclic").problems) == 2
    assert len(scan(["--num-experts"], training_flags()).problems) == 1


def test_flags_without_effect_are_warnings_by_reason() -> None:
    line = scan_of("--use-flash-attn --DDP-impl local --profile-ranks 0 1 --profile")
    assert codes(line.warnings) == ["ignored-flag"] * 3
    assert "--profile-ranks, --profile" in line.warnings[2]
    assert line.problems == []


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("stray --num-layers 2", "stray"),
        ("--num-layers 2 stray", "stray"),
        ("--fp16 true", "true"),
        ("--fp16=true", "true"),
    ],
)
def test_rejects_an_argument_that_belongs_to_no_flag(line: str, word: str) -> None:
    (problem,) = scan_of(line).problems
    assert problem.code == "unexpected-argument"
    assert repr(word) in problem


def test_all_problems_of_a_line_are_reported_at_once() -> None:
    line = scan_of(
        "--num-layers two --lr-decay-style cos --hiden-size 8 --sequence-parallel --fp16 yes "
        "--micro-batch-size 2 --batch-size 4 --num-attention-heads 2.5 --hidden-size 9 --bf16 "
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
