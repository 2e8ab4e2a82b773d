"""The declarations of the optimizers agree with their options, problems and each other."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from megatron_ds.config import OptimizerConfig
from megatron_ds.config.fields import option_fields
from megatron_ds.config.options.optimizer_specs import (
    ADAM,
    ADAM_STOCHASTIC,
    NAMES,
    SPECS,
    OptimizerSpec,
    excluded_by,
    is_bound_to_layout,
)
from megatron_ds.config.problems import Problem
from megatron_ds.config.support_matrix import AXES, RULES
from tests.optimizers import options_of

FIELDS = {item.name: option for item, option in option_fields(OptimizerConfig)}
by_name = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.switch or spec.name)


@by_name
def test_options_select_the_declaration(spec: OptimizerSpec) -> None:
    assert options_of(spec).spec is spec


def test_a_switch_of_another_optimizer_selects_nothing() -> None:
    assert OptimizerConfig(optimizer="sgd", use_bnb_optimizer=True).spec.name == "sgd"
    assert OptimizerConfig(optimizer="soap", normuon=True).spec.name == "soap"
    assert OptimizerConfig(optimizer="unknown").spec is ADAM


@by_name
def test_options_of_a_declaration_have_an_effect_with_it(spec: OptimizerSpec) -> None:
    states = [*spec.states, *(spec.matrices.states if spec.matrices else ())]
    named = {name for state in states for name in (state.dtype, state.only_with) if name}
    options = options_of(spec)
    for name in spec.options | named:
        assert FIELDS[name].unmet(options) is None, name
    if spec.matrices is not None:
        assert "{" not in spec.matrices.description.format_map(vars(options))


@by_name
def test_options_of_an_optimizer_alone_are_in_its_declaration(spec: OptimizerSpec) -> None:
    """An option that only one optimizer has decides something of it."""
    used = spec.options.union(*(other.options for other in SPECS if other.name == spec.name))
    switches = {other.switch for other in SPECS}
    for name, option in FIELDS.items():
        (*_, condition) = option.conditions or (None,)
        if condition is not None and condition.admitted == {"optimizer": (spec.name,)}:
            assert name in used | switches, name


def test_names_of_optimizers_are_unique() -> None:
    others = [spec for spec in SPECS if spec is not ADAM_STOCHASTIC]
    assert len({spec.checkpoint_name for spec in others}) == len(others)
    assert ADAM_STOCHASTIC.checkpoint_name == ADAM.checkpoint_name  # as masters of either type
    types = [
        name.lower()
        for spec in SPECS
        if not spec.switch
        for name in (*spec.file_types, *spec.file_aliases)
    ]
    assert len(set(types)) == len(types)
    assert tuple(AXES["optimizer"].values) == NAMES


def test_exclusions_are_problems_and_axes() -> None:
    for spec in SPECS:
        assert spec.excluded_axes == tuple(axis for axis in spec.excluded_axes if axis in AXES)
        for code in spec.excludes:
            assert Problem(code, settings=options_of(spec), combination="", closest="").code == code
    for rule in RULES:
        if (names := rule.values.get("optimizer")) is not None:
            assert names == excluded_by(rule.code) != ()


def test_an_optimizer_is_excluded_by_default_from_what_is_tested_with_adam() -> None:
    plain = OptimizerSpec("plain", "Plain", "Plain", {}, ())
    assert all(code in plain.excludes for code in ("nvme-with-other-optimizer",))
    assert not ADAM.excludes


def test_only_8_bit_states_are_bound_to_their_layout() -> None:
    names = [spec.checkpoint_name for spec in SPECS if is_bound_to_layout(spec.checkpoint_name)]
    assert names == ["adam8bit"]
    assert not is_bound_to_layout("an optimizer of another version")


def test_a_variant_differs_from_its_optimizer() -> None:
    for first, second in itertools.pairwise(SPECS):
        if second.switch:
            assert first.name == second.name
            changed = {name for name, value in vars(second).items() if value != vars(first)[name]}
            assert changed > {"saved_name", "switch"}
        assert dataclasses.replace(second) == second


@by_name
def test_a_rate_above_one_is_warned_about_where_steps_are_bounded(spec: OptimizerSpec) -> None:
    """Most likely a forgotten minus: 3e4 for 3e-4."""
    codes = {
        rate: [one.code for one in dataclasses.replace(options_of(spec), lr=rate).warnings()]
        for rate in (3e-4, 1.0, 3e4)
    }
    warned = ["learning-rate-above-one"] * spec.has_bounded_steps
    assert codes == {3e-4: [], 1.0: [], 3e4: warned}
