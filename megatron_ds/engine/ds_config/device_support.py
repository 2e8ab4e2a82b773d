"""Whether DeepSpeed supports the keys of `config.passed_keys` on this device."""

from __future__ import annotations

from typing import Any

from megatron_ds.config.passed_keys import DEEPCOMPILE, SUPER_OFFLOAD

OPERATIONS = {
    "zero_optimization.zero_quantized_weights": "QuantizerBuilder",
    "zero_optimization.zero_quantized_gradients": "QuantizerBuilder",
    SUPER_OFFLOAD: "CPUAdamBuilder",
    DEEPCOMPILE: "DeepCompileBuilder",
}
"""DeepSpeed's builder of the operation that each key needs."""


def find_obstacle(key: str) -> str | None:
    """Why DeepSpeed does not support a key of the table on this device; None if it does."""
    from deepspeed.accelerator import get_accelerator

    builder = get_accelerator().create_op_builder(OPERATIONS[key])
    if builder is None or not _is_implemented(builder):
        return f"DeepSpeed has no {OPERATIONS[key].removesuffix('Builder')} operation for it"
    if not builder.is_compatible(verbose=False):
        return f"DeepSpeed cannot build its operation {builder.NAME}"
    if key == DEEPCOMPILE:
        from deepspeed.compile.util import is_deepcompile_supported

        return (
            None if is_deepcompile_supported() else "DeepSpeed does not support DeepCompile on it"
        )
    if key == SUPER_OFFLOAD:
        from deepspeed.runtime.superoffload import superoffload_stage3

        try:
            superoffload_stage3._validate_superoffload_accelerator()
        except AssertionError as error:
            return str(error)
    return None


def _is_implemented(builder: Any) -> bool:
    """Whether an accelerator has an operation, and no placeholder for it."""
    return all(base.__name__ != "NotImplementedBuilder" for base in type(builder).__mro__)
