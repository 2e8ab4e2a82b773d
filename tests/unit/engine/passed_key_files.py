"""A file and flags that turn each key of `engine.ds_config.passthrough` on. Has no tests."""

from __future__ import annotations

from typing import Any

KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "zero_optimization.zero_quantized_weights": [
        {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
        "",
    ],
    "zero_optimization.zero_quantized_gradients": [
        {"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}},
        "--bf16",
    ],
    "zero_optimization.offload_optimizer.super_offload": [
        {
            "zero_optimization": {
                "stage": 3,
                "offload_optimizer": {
                    "device": "cpu",
                    "super_offload": True,
                    "cpuadam_cores_perc": 0.5,
                },
            }
        },
        "--bf16",
    ],
    "compile.deepcompile": [{"compile": {"deepcompile": True, "double_buffer": False}}, "--bf16"],
}
