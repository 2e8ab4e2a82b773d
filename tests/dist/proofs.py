"""The tests that compare layouts of the support matrix with one process, and what each covers."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron_ds.config.support_matrix import AXES, MANY, Layout, Values


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
ZERO, TP = EVERYTHING["zero"], EVERYTHING["tp"]
SEQUENCE: Values = {"tp": (MANY,), "sequence": ("on",)}
ULYSSES = "tests/dist/test_ulysses.py::test_shared_sequences_train_like_one_process"
STAGES = "tests/dist/test_pipeline.py::test_stages_equal_one_process"
PROOFS: tuple[Proof, ...] = (
    Proof("tests/dist/test_layouts.py::test_layout_equals_one_process", EVERYTHING),
    Proof(
        "tests/dist/test_parity.py::test_layout_equals_one_process",
        {"zero": ZERO, "tp": TP, "optimizer": ("adam", "sgd", "lion", "muon")},
    ),
    Proof(
        "tests/dist/test_precision.py::test_bf16_follows_fp32",
        {"zero": ("1", "2", "3"), "tp": TP, "precision": ("bf16",)},
    ),
    Proof(
        "tests/dist/test_fp16.py::test_fp16_follows_fp32",
        {"zero": ("1", "2", "3"), "tp": TP, "precision": ("fp16",)},
    ),
    Proof(
        "tests/dist/test_precision.py::test_offloading_changes_nothing",
        {"zero": ("1", "2", "3"), "tp": TP, "offload": ("optimizer",)},
    ),
    Proof(
        "tests/dist/test_parity.py::test_second_copies_of_parameters_change_nothing",
        {"zero": ("3",), "hpz": (MANY,), "optimizer": ("adam",)},
    ),
    Proof(
        "tests/dist/test_precision.py::test_states_on_a_disk_change_nothing",
        {"zero": ("3",), "tp": TP, "offload": ("nvme",)},
    ),
    Proof(
        "tests/dist/test_precision.py::test_bf16_master_weights_follow_fp32",
        {"zero": ("2", "3"), "precision": ("bf16",), "masters": ("bf16",)},
    ),
    Proof(
        "tests/dist/test_sequence_parallel.py::test_layout_equals_one_process",
        {**SEQUENCE, "zero": ZERO, "optimizer": ("adam", "sgd")},
    ),
    Proof(
        "tests/dist/test_sequence_parallel.py::test_dropout_masks_are_those_of_one_process",
        {**SEQUENCE, "recompute": ("none", "selective", "full", "deepspeed")},
    ),
    Proof(
        "tests/dist/test_sequence_parallel.py::test_packed_documents_equal_one_process",
        {**SEQUENCE, "documents": ("on",)},
    ),
    Proof(
        "tests/dist/test_sequence_parallel.py::test_changing_lengths_equal_one_process",
        {**SEQUENCE, "curriculum": ("on",)},
    ),
    Proof(ULYSSES, {"sp": (MANY,), "zero": ZERO[1:], "tp": TP, "optimizer": ("adam", "sgd")}),
    Proof(ULYSSES, {"sp": (MANY,), "documents": ("off", "on")}),
    Proof(ULYSSES, {**SEQUENCE, "sp": (MANY,), "zero": ("1", "3")}),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {
            "experts": ("replicated",),
            "zero": ZERO,
            "tp": TP,
            "optimizer": ("adam", "sgd"),
            "recompute": ("none", "selective"),
        },
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {
            "experts": ("distributed",),
            "zero": ("1", "2"),
            "tp": TP,
            "optimizer": ("adam", "sgd"),
        },
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {
            "experts": ("distributed",),
            "tp": TP,
            "recompute": ("none", "full", "deepspeed", "partitioned"),
        },
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {"experts": ("distributed",), "documents": ("on",), "curriculum": ("on",)},
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {"experts": ("distributed",), "zero": ("0",)},
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {"experts": ("distributed",), "sp": (MANY,), "optimizer": ("sgd",)},
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {"experts": ("distributed",), "pp": (MANY,), "recompute": ("full",)},
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {**SEQUENCE, "experts": ("replicated",), "pp": (MANY,), "optimizer": ("sgd",)},
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_train_like_one_process",
        {"experts": ("distributed",), "tp": (MANY,), "zero": ("2",), "optimizer": ("muon",)},
    ),
    Proof(
        "tests/dist/test_experts.py::test_experts_in_half_precision_have_the_norm_of_one_process",
        {
            "experts": ("distributed",),
            "zero": ("1", "2"),
            "tp": TP,
            "precision": ("bf16", "fp16"),
        },
    ),
    Proof(STAGES, {"pp": (MANY,), "zero": ("0", "1"), "tp": TP, "optimizer": ("adam", "sgd")}),
    Proof(STAGES, {"pp": (MANY,), "tp": TP, "recompute": ("full", "deepspeed")}),
    Proof(STAGES, {"pp": (MANY,), "tp": TP, "documents": ("on",)}),
    Proof(STAGES, {"pp": (MANY,), "curriculum": ("on",)}),
    Proof(STAGES, {**SEQUENCE, "pp": (MANY,), "zero": ("0", "1")}),
    Proof(STAGES, {"pp": (MANY,), "offload": ("optimizer",)}),
)
