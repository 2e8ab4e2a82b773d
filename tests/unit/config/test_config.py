"""Derived values of the configuration and its flags."""

from __future__ import annotations

import ast
import dataclasses
import itertools
from pathlib import Path

import pytest

from megatron_ds.config import GROUPS, ModelConfig, field_help, flag_of
from megatron_ds.config.field_help import option_help
from megatron_ds.config.fields import option_fields
from tests.problems import codes
from tests.tables import tables

REPOSITORY = Path(__file__).resolve().parents[3]
TABLES = tables(__file__)

MODEL = ModelConfig(num_layers=2, hidden_size=48, num_attention_heads=6, seq_length=16)


@pytest.mark.parametrize(("vocab", "tp"), [(50257, 1), (50257, 2), (50257, 4), (50257, 8)])
def test_padded_vocabulary_is_independent_of_tensor_parallel_size(vocab, tp):
    assert dataclasses.replace(MODEL, vocab_size=vocab).padded_vocab(tp) == 50304


def test_padded_vocabulary_is_divisible_by_odd_tensor_parallel_size():
    assert dataclasses.replace(MODEL, vocab_size=100).padded_vocab(3) == 384


def test_default_sizes_are_derived():
    swiglu = ModelConfig(hidden_size=1024, num_attention_heads=16, activation="swiglu")
    assert swiglu.mlp_hidden_size == 2688
    assert dataclasses.replace(swiglu, activation="geglu").mlp_hidden_size == 4096
    assert swiglu.head_dim == 64
    assert swiglu.kv_heads == 16


@pytest.mark.parametrize(("size", "pattern", "expected"), TABLES["windows"])
def test_each_layer_has_a_window(size, pattern, expected):
    """With the meaning of Megatron: the tokens before a token, and the layers without a window."""
    model = dataclasses.replace(
        MODEL, num_layers=6, window_size=size, window_attn_skip_freq=pattern
    )
    assert list(model.problems(1)) == []
    assert list(model.windows) == expected


@pytest.mark.parametrize(("size", "pattern", "expected"), TABLES["wrong_windows"])
def test_a_window_of_another_form_is_a_problem(size, pattern, expected):
    model = dataclasses.replace(MODEL, window_size=size, window_attn_skip_freq=pattern)
    assert codes(model.problems(1)) == [expected]


def test_each_option_has_a_help_text_and_says_what_it_decides():
    for group in GROUPS.values():
        for item, spec in option_fields(group):
            assert spec.decides, f"{item.name}: no `decides`, and {group.__name__} has no DECIDES"
            text = spec.help or option_help(group, item.name)
            assert len(text) > 10 or item.name in ("optimizer", "hidden_size"), item.name
            assert not text.endswith(".") or text.endswith("..."), item.name


def test_a_help_text_is_the_docstring_below_the_field():
    assert option_help(GROUPS["optimizer"], "lr") == "maximum learning rate"
    assert option_help(GROUPS["model"], "num_layers") == "number of transformer layers"
    assert option_help(GROUPS["model"], "rotary_base") == "base period of RoPE"
    assert option_help(GROUPS["model"], "add_bias_linear") == "disable bias in the linear layers"
    assert option_help(GROUPS["deepspeed"], "zero_stage").startswith("ZeRO stage: 0 partitions")
    assert option_help(GROUPS["recompute"], "recompute_granularity").startswith("full: recompute")
    with pytest.raises(KeyError, match=r"ModelConfig\.no_such_field has no docstring"):
        option_help(GROUPS["model"], "no_such_field")


def test_docstrings_of_fields_are_those_of_a_parser() -> None:
    found = 0
    for path in sorted((REPOSITORY / "megatron_ds").rglob("*.py")):
        if "option_field" not in (source := path.read_text()):
            continue
        name = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts)
        parsed = {
            (cls.name, field.target.id): below.value.value
            for cls in ast.parse(source).body
            if isinstance(cls, ast.ClassDef)
            for field, below in itertools.pairwise(cls.body)
            if isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        }
        assert field_help._docstrings(name, str(path)) == parsed, path
        found += len(parsed)
    assert found > 300


def test_each_field_has_its_own_flag():
    flags = [flag_of(item.name) for group in GROUPS.values() for item, _ in option_fields(group)]
    assert len(flags) == len(set(flags))
    assert flag_of("add_bias_linear") == "--disable-bias-linear"
    assert flag_of("deepspeed_config") == "--deepspeed_config"
