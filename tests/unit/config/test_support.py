"""The support matrix: every "no" is rejected before allocation, every "yes" has a test."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config, support_matrix
from megatron_ds.config.fields import option_fields
from megatron_ds.config.options.optimizer import OptimizerConfig
from megatron_ds.config.problems import Problem
from megatron_ds.config.support_matrix import AXES, RULES, Layout, Rule
from megatron_ds.engine.ds_config.merge import merge_file
from tests.dist import layouts, proofs
from tests.dist.proofs import EVERYTHING, PROOFS
from tests.problems import codes
from tests.tables import tables
from tests.unit.engine.ds_files import FLAGS

TABLES = tables(__file__)

REPOSITORY = Path(__file__).resolve().parents[3]
DATA = "--data-path x --tokenizer-type NullTokenizer --vocab-size 90"
WORLD_SIZE = 4
DEFAULTS = {name: axis.default for name, axis in AXES.items()}


def flags_of(layout: Layout) -> str:
    """The command line of a layout."""
    return " ".join([FLAGS, DATA, *(AXES[axis].values[value] for axis, value in layout.items())])


def forbidden(rule: Rule) -> Iterator[dict[str, str]]:
    """Every combination that a rule names."""
    for values in itertools.product(*rule.values.values()):
        yield dict(zip(rule.values, values, strict=True))


def configure(layout: Layout) -> tuple[Config, list[Problem]]:
    """The configuration of a layout's command line, and its problems.

    Neither a process group nor a model exists then.
    """
    words = flags_of(layout).split()
    return build_config(words, world_size=WORLD_SIZE, warn=lambda _: None, complete=merge_file)


def test_forbidden_layouts_are_rejected_and_the_closest_ones_are_not() -> None:
    """Claim (deepspeed): layouts that do not work, or that DeepSpeed computes incorrectly, are
    rejected with the closest one that works ([support_matrix.md](../reference/support_matrix.md))
    """
    wrong = []
    for rule, part in ((each, part) for each in RULES for part in forbidden(each)):
        config, problems = configure(part)
        wanted = support_matrix.closest(support_matrix.layout_of(config))
        is_kept = not rule.forbids(DEFAULTS | dict(part) | dict(rule.alternative))
        if rule.code not in codes(problems) or not is_kept or configure(wanted)[1]:
            wrong.append((rule.code, part, problems, wanted))
    assert wrong == []


@pytest.mark.parametrize(("layout", "start", "end"), TABLES["messages"])
def test_message_names_the_flags_and_those_that_work(layout: Layout, start: str, end: str) -> None:
    texts = [str(problem) for problem in configure(DEFAULTS | dict(layout))[1]]
    assert any(text.startswith(start) and text.endswith(end) for text in texts), texts


def test_closest_layout_keeps_experts() -> None:
    """Without them, two rules would be kept by one change."""
    layout = {"experts": "distributed", "zero": "3", "precision": "bf16", "masters": "bf16"}
    wanted = support_matrix.closest(DEFAULTS | layout)

    assert wanted == DEFAULTS | {"experts": "distributed", "zero": "2", "precision": "bf16"}


def test_pairs_are_accepted_unless_a_rule_forbids_them() -> None:
    """Those that are accepted are in the runs that are compared with one process."""
    compared = set().union(*map(layouts.pairs_of, layouts.covering()))
    wrong = [
        pair
        for one, other in itertools.combinations(AXES, 2)
        for pair in proofs.pairs(one, other)
        if not is_as_the_matrix_says(pair)
        or (frozenset(pair.items()) in compared) != (proofs.obstacle(pair) is None)
    ]
    assert wrong == []


def is_as_the_matrix_says(pair: Layout) -> bool:
    """Whether the command line accepts a pair, rejects it or warns, as the table says."""
    layout = proofs.completed(pair)
    config, problems = configure(layout)
    rule = proofs.obstacle(pair)
    if rule is None:
        return support_matrix.layout_of(config) == layout and problems == []
    if rule.code:
        return rule.code in codes(problems)
    return support_matrix.layout_of(config) != layout and "no-effect" in codes(config.warnings())


def test_proofs_name_tests_and_values() -> None:
    """The first one covers every pair: it runs the layouts of the test above."""
    first, *others = PROOFS
    assert first.test == "tests/dist/test_layouts.py::test_layout_equals_one_process"
    assert all(proof.values != EVERYTHING for proof in others)
    for proof in PROOFS:
        file, _, name = proof.test.partition("::")
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        for axis, values in proof.values.items():
            assert set(values) <= set(AXES[axis].values), proof


def test_rules_name_values_of_axes() -> None:
    for rule in RULES:
        for axis, values in rule.values.items():
            assert set(values) <= set(AXES[axis].values), rule.code
        for axis, value in rule.alternative.items():
            assert value in AXES[axis].values, rule.code


def test_axes_have_all_choices_of_their_options() -> None:
    (spec,) = (s for item, s in option_fields(OptimizerConfig) if item.name == "optimizer")
    assert spec.choices == tuple(AXES["optimizer"].values)


def test_no_flags_are_the_default_layout() -> None:
    config, problems = configure({})

    assert problems == []
    assert support_matrix.layout_of(config) == DEFAULTS
