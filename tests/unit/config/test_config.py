"""Derived values of the configuration and its flags."""

from __future__ import annotations

import ast
import dataclasses
import tomllib

import pytest

from megatron_ds.config import GROUPS, ModelConfig, flag_of
from megatron_ds.config.fields import option_fields
from megatron_ds.config.problems import PACKAGE
from tests.problems import codes
from tests.tables import tables

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


def test_each_help_text_is_that_of_a_declared_option():
    for file in PACKAGE.glob("*/option_help.toml"):
        trees = [ast.parse(path.read_text(encoding="utf-8")) for path in file.parent.rglob("*.py")]
        declared = {
            (group.name, ast.unparse(field.target))
            for tree in trees
            for group in tree.body
            if isinstance(group, ast.ClassDef)
            for field in group.body
            if isinstance(field, ast.AnnAssign)
        }
        texts = tomllib.loads(file.read_text(encoding="utf-8"))
        named = {(group, field) for group, fields in texts.items() for field in fields}
        assert named <= declared, f"remove what {file} has beyond them"
    specs = {item.name: spec for item, spec in option_fields(GROUPS["optimizer"])}
    assert specs["lr"].help == "maximum learning rate"


def test_each_field_has_its_own_flag():
    flags = [flag_of(item.name) for group in GROUPS.values() for item, _ in option_fields(group)]
    assert len(flags) == len(set(flags))
    assert flag_of("add_bias_linear") == "--disable-bias-linear"
    assert flag_of("deepspeed_config") == "--deepspeed_config"
