"""The tests that compare layouts of the support matrix with one process, and what each covers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from megatron_ds.config.support_matrix import (
    AXES,
    MANY,
    RULES,
    WITHOUT_EFFECT,
    Layout,
    Rule,
    Values,
    closest,
)


@dataclass(frozen=True)
class Proof:
    """A test that compares layouts with one process.

    Attributes:
        test: File and name.
        values: By axis the values that it covers: every pair of them, and each of them with the
            default values of the axes that are not named.
    """

    test: str
    values: Values = field(default_factory=dict)

    def covers(self, layout: Layout) -> bool:
        """Whether all values of a part of a layout are covered."""
        return all(
            value in self.values.get(axis, (AXES[axis].default,)) for axis, value in layout.items()
        )


EVERYTHING: Values = {name: tuple(axis.values) for name, axis in AXES.items()}
PARTITIONED = EVERYTHING["zero"][1:]
SEQUENCE: Values = {"tp": (MANY,), "sequence": ("on",)}
PRECISION = "tests/dist/test_precision.py"
SHARDED = "tests/dist/test_sequence_parallel.py"
ULYSSES = "tests/dist/test_ulysses.py::test_shared_sequences_train_like_one_process"
EXPERTS = "tests/dist/test_experts.py::test_experts_train_like_one_process"
STAGES = "tests/dist/test_pipeline.py::test_stages_equal_one_process"
PROOFS: tuple[Proof, ...] = (
    Proof("tests/dist/test_layouts.py::test_layout_equals_one_process", EVERYTHING),
    Proof(
        "tests/dist/test_parity.py::test_layout_equals_one_process",
        {"zero": PARTITIONED, "optimizer": ("muon",)},
    ),
    Proof(
        "tests/dist/test_parity.py::test_second_copies_of_parameters_change_nothing",
        {"zero": ("3",), "tp": (MANY,), "hpz": (MANY,), "optimizer": ("sgd",)},
    ),
    Proof(f"{PRECISION}::test_bf16_follows_fp32", {"zero": PARTITIONED, "precision": ("bf16",)}),
    Proof(
        "tests/dist/test_fp16.py::test_fp16_follows_fp32",
        {"zero": PARTITIONED, "precision": ("fp16",)},
    ),
    Proof(
        f"{PRECISION}::test_offloading_changes_nothing",
        {"zero": PARTITIONED, "offload": ("optimizer",)},
    ),
    Proof(
        f"{PRECISION}::test_states_on_a_disk_change_nothing",
        {"zero": ("3",), "tp": EVERYTHING["tp"], "offload": ("nvme",)},
    ),
    Proof(
        f"{PRECISION}::test_bf16_master_weights_follow_fp32",
        {"zero": ("2", "3"), "precision": ("bf16",), "masters": ("bf16",)},
    ),
    Proof(f"{SHARDED}::test_dropout_masks_are_those_of_one_process", SEQUENCE),
    Proof(
        f"{SHARDED}::test_packed_documents_equal_one_process", {**SEQUENCE, "documents": ("on",)}
    ),
    Proof(ULYSSES, {"sp": (MANY,), "zero": PARTITIONED}),
    Proof(ULYSSES, {"sp": (MANY,), "documents": ("off", "on")}),
    Proof(EXPERTS, {"experts": ("distributed",), "zero": ("1", "2")}),
    Proof(EXPERTS, {"experts": ("distributed",), "documents": ("on",), "curriculum": ("on",)}),
    Proof(EXPERTS, {"experts": ("distributed",), "pp": (MANY,), "recompute": ("full",)}),
    Proof(
        "tests/dist/test_experts.py::test_experts_in_half_precision_have_the_norm_of_one_process",
        {"experts": ("distributed",), "zero": ("1", "2"), "precision": ("bf16",)},
    ),
    Proof(STAGES, {"pp": (MANY,), "tp": EVERYTHING["tp"]}),
    Proof(STAGES, {"pp": (MANY,), "zero": ("0", "1")}),
)


def pairs(one: str, other: str) -> Iterator[Layout]:
    """Every pair of values of two axes."""
    for first, second in itertools.product(AXES[one].values, AXES[other].values):
        yield {one: first, other: second}


def obstacle(part: Layout) -> Rule | None:
    """The rule that excludes these values, or None."""
    layout = completed(part)
    return next((rule for rule in (*RULES, *WITHOUT_EFFECT) if rule.forbids(layout)), None)


def completed(part: Layout) -> Layout:
    """A layout with these values, and the defaults of other axes as far as the rules allow."""
    defaults = {name: axis.default for name, axis in AXES.items()}
    return closest(defaults | dict(part), part)
