"""Options of processes and kernels."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config.fields import option_field
from megatron_ds.presets import PRESETS

MEGATRON = {"auto": "auto", "flash": "flash", "fused": "cudnn", "unfused": "math", "local": "math"}
"""The kernels of attention by Megatron's names."""


@dataclass(frozen=True)
class RuntimeConfig:
    """Files of settings, seed, process groups and compilation."""

    config: tuple[str, ...] | None = option_field(None, nargs="*", metavar="FILE", repeatable=True)
    preset: str | None = option_field(None, choices=PRESETS)
    print_config: bool = option_field(False)
    dry_run: int | None = option_field(None, minimum=1)
    seed: int = option_field(1234, minimum=0, below=1 << 32)
    distributed_backend: str | None = option_field(None, choices=("nccl", "gloo", "ccl", "hccl"))
    distributed_timeout_minutes: float = option_field(10.0, above=0)
    hang_timeout: float | None = option_field(None, above=0)
    host_timeout: float = option_field(60.0, above=0)
    memory_check: str = option_field("error", choices=("error", "warn", "off"))
    compile: bool = option_field(False)
    no_compile: bool = option_field(False)
    attention_backend: str = option_field(
        "auto",
        choices=("auto", "flash", "cudnn", "efficient", "math"),
        synonyms={
            **{name: value for name, value in MEGATRON.items() if name != value},
            **{f"AttnBackend.{name}": value for name, value in MEGATRON.items()},
        },
    )
    tf32: bool = option_field(False)
    deterministic_mode: bool = option_field(False)
