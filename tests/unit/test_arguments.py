"""The command line: every spelling, every error with a hint, and a frozen list of flags."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ds.arguments import build_parser, parse, read
from megatron_ds.config import Config

GOLDEN = Path(__file__).parents[1] / "golden" / "flags.txt"


def config_of(line: str) -> Config:
    config, _ = read(line.split(), world_size=1, warn=lambda _: None)
    assert config is not None
    return config


def problems_of(line: str) -> list[str]:
    return read(line.split(), world_size=1, warn=lambda _: None)[1]


def test_the_list_of_flags_is_frozen():
    """A new flag is a visible change: python tests/unit/test_arguments.py rewrites the list."""
    assert flag_list() == GOLDEN.read_text()


def flag_list() -> str:
    lines = []
    for action in build_parser()._actions:
        kind = getattr(action.type, "__name__", "") if action.nargs != 0 else "switch"
        kind = "text" if kind in ("str", "<lambda>", "") else kind
        lines.append(f"{' '.join(action.option_strings)}: {kind}")
    return "\n".join(sorted(lines)) + "\n"


@pytest.mark.parametrize("flag", ["--num-layers", "--num_layers"])
def test_dashes_and_underscores(flag):
    assert config_of(f"{flag} 3").model.num_layers == 3
    assert config_of(f"{flag}=3").model.num_layers == 3


def test_numbers_may_be_grouped():
    config = config_of("--train-samples 10_000 --rampup-batch-size 2 2 1_000")
    assert config.schedule.train_samples == 10000
    assert config.schedule.rampup_batch_size == (2, 2, 1000)


def test_aliases_reach_the_same_field():
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


def test_switches_turn_off_what_is_on_by_default():
    config = config_of("--disable-bias-linear --no-bias-gelu-fusion")
    assert config.model.add_bias_linear is False
    assert config.model.bias_gelu_fusion is False
    assert config_of("").model.add_bias_linear is True


def test_flags_that_stand_for_a_value():
    assert config_of("--swiglu").model.activation == "swiglu"
    assert config_of("--openai-gelu").model.activation == "openai-gelu"
    assert config_of("--use-rotary-position-embeddings").model.position_embedding_type == "rope"


def test_glu_activation_keeps_the_width_of_its_fork():
    assert config_of("--hidden-size 96 --glu-activation swiglu").model.ffn == 384
    assert config_of("--hidden-size 96 --swiglu").model.ffn == 256
    assert config_of("--hidden-size 96 --ffn-hidden-size 8 --glu-activation geglu").model.ffn == 8


def test_what_was_given_is_remembered():
    given = config_of("--num-layers 2 --swiglu").given
    assert given == {"num_layers", "activation"}


def test_a_typo_gets_the_nearest_name():
    problems = problems_of("--num-layerz 3")
    assert "there is no flag --num-layerz; did you mean --num-layers?" in problems


def test_a_refused_flag_says_what_to_do():
    assert any(
        line.startswith("--train-tokens is not supported: give --train-samples")
        for line in problems_of("--train-tokens 5")
    )


def test_a_flag_without_effect_is_a_warning():
    said: list[str] = []
    line = ["--use-flash-attn", "--DDP-impl", "local"]
    _, problems = read(line, world_size=1, warn=said.append)
    assert sorted(line.split()[0] for line in said) == ["--DDP-impl", "--use-flash-attn"]
    assert not any("--use-flash-attn" in line or "--DDP-impl" in line for line in problems)


def test_a_wrong_value_is_named_with_its_flag():
    assert any("--num-layers" in line and "two" in line for line in problems_of("--num-layers two"))


def test_a_stray_word_is_named():
    assert "'stray' belongs to no flag" in problems_of("--num-layers 2 stray")


def test_parse_ends_the_program_and_names_all(capsys):
    with pytest.raises(SystemExit) as ended:
        parse(["--num-layers", "2"])
    assert ended.value.code == 2
    shown = capsys.readouterr().err
    assert "--hidden-size is required" in shown
    assert "--lr is required" in shown


def test_only_the_first_rank_speaks(capsys):
    with pytest.raises(SystemExit):
        parse([], rank=1)
    assert capsys.readouterr().err == ""


def test_schedule_problems_are_among_them():
    line = "--micro-batch-size 1 --train-iters 10 --lr 1e-3 --lr-warmup-iters 20"
    assert any("warm-up" in problem for problem in problems_of(line))


def test_help_names_each_flag_once_with_its_default(capsys):
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args(["--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "--micro-batch-size" in shown
    assert "--micro_batch_size" not in shown
    assert "(default: 0.02)" in shown
    assert "==SUPPRESS==" not in shown


if __name__ == "__main__":
    GOLDEN.write_text(flag_list())
