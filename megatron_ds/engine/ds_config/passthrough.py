"""Keys of DeepSpeed's file that are passed on where DeepSpeed supports them, without a test.

Everything else of a layout is in `config.support_matrix`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron_ds.config import Config, support_matrix
from megatron_ds.config.checks import listed
from megatron_ds.config.problems import Problem
from megatron_ds.config.support_matrix import Layout, Values
from megatron_ds.dataclass import dataclass
from megatron_ds.engine.ds_config.keys import TABLES

SUPER_OFFLOAD = "zero_optimization.offload_optimizer.super_offload"
CORES = "zero_optimization.offload_optimizer.cpuadam_cores_perc"
DEEPCOMPILE = "compile.deepcompile"
QUANTIZER = "QuantizerBuilder"


@dataclass(frozen=True)
class PassedKey:
    """A key of DeepSpeed's file that is passed on where DeepSpeed supports it, without a test.

    Attributes:
        key: Dotted name.
        builder: DeepSpeed's builder of the operation that it needs.
        effect: Description of its effect, for the documentation and the warning of a run.
        is_approximation: Whether a run with it differs from one process by more than rounding.
        values: Values with which it is passed on, by axis; other axes must have their default.
    """

    key: str
    builder: str
    effect: str
    is_approximation: bool
    values: Values

    def excluded(self, layout: Layout) -> Layout:
        """The values of a layout with which it is not passed on."""
        return {
            axis: value
            for axis, value in layout.items()
            if value not in self.values.get(axis, (support_matrix.AXES[axis].default,))
        }


PASSED = tuple(PassedKey(**entry) for entry in TABLES["passed_on"])
"""Keys that are passed on to DeepSpeed, in the order of the documentation."""


def find(config: Config) -> list[PassedKey]:
    """The keys of `PASSED` that the DeepSpeed file of a complete configuration turns on."""
    file = config.deepspeed_file
    if file is None:
        return []
    # Elsewhere quantization has no effect, with a warning.
    is_quantizing = support_matrix.layout_of(config)["zero"] == "3"
    return [
        passed
        for passed in PASSED
        if file.get(passed.key) and (is_quantizing or passed.builder != QUANTIZER)
    ]


def problems(config: Config) -> Iterator[Problem]:
    """Settings with which the keys of a complete configuration are not passed on."""
    layout = support_matrix.layout_of(config)
    file = config.deepspeed_file
    if file is None:
        return
    passed = find(config)
    for one in passed:
        if excluded := one.excluded(layout):
            words = listed(
                support_matrix.AXES[axis].flags_text(value) for axis, value in excluded.items()
            )
            yield file.at(one.key, Problem("passed-key-with-layout", key=one.key, layout=words))
    keys = {one.key for one in passed}
    if DEEPCOMPILE in keys and config.runtime.compile:
        yield file.at(DEEPCOMPILE, Problem("deepcompile-with-compile"))
    if SUPER_OFFLOAD in keys:
        if config.checkpoint.save is not None or config.checkpoint.load is not None:
            yield file.at(SUPER_OFFLOAD, Problem("super-offload-with-checkpoints"))
        if config.optimizer.start_weight_decay != config.optimizer.end_weight_decay:
            yield file.at(SUPER_OFFLOAD, Problem("super-offload-with-weight-decay-schedule"))
        if config.logging.reads_optimizer:
            yield file.at(SUPER_OFFLOAD, Problem("super-offload-with-norms"))
        if file.get(CORES) == 0:
            yield file.invalid(CORES, "must be more than 0")


def unsupported_reason(passed: PassedKey) -> str | None:
    """Returns the reason that DeepSpeed lacks a key on this device; None if it has it."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(passed.builder)
    if builder is None or not _is_implemented(builder):
        return f"DeepSpeed has no {passed.builder.removesuffix('Builder')} operation for it"
    if not builder.is_compatible(verbose=False):
        return f"DeepSpeed cannot build its operation {builder.NAME}"
    if passed.key == DEEPCOMPILE:
        from deepspeed.compile.util import is_deepcompile_supported

        return (
            None if is_deepcompile_supported() else "DeepSpeed does not support DeepCompile on it"
        )
    if passed.key == SUPER_OFFLOAD:
        from deepspeed.runtime.superoffload import superoffload_stage3

        try:
            superoffload_stage3._validate_superoffload_accelerator()
        except AssertionError as error:
            return str(error)
    return None


def _is_implemented(builder: Any) -> bool:
    """Whether an accelerator has an operation, and no placeholder for it."""
    return all(base.__name__ != "NotImplementedBuilder" for base in type(builder).__mro__)
