"""A file and flags that turn each key of `engine.ds_config.passthrough` on. Has no tests."""

from __future__ import annotations

from typing import Any

ZERO = "zero_optimization"
OFFLOAD = {"device": "cpu", "super_offload": True, "cpuadam_cores_perc": 0.5}
KEYS: dict[str, tuple[dict[str, Any], str]] = {
    f"{ZERO}.zero_quantized_weights": ({ZERO: {"stage": 3, "zero_quantized_weights": True}}, ""),
    f"{ZERO}.zero_quantized_gradients": (
        {ZERO: {"stage": 3, "zero_quantized_gradients": True}},
        "--bf16",
    ),
    f"{ZERO}.offload_optimizer.super_offload": (
        {ZERO: {"stage": 3, "offload_optimizer": OFFLOAD}},
        "--bf16",
    ),
    "compile.deepcompile": ({"compile": {"deepcompile": True, "double_buffer": False}}, "--bf16"),
}
