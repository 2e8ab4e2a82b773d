"""Options of processes and kernels."""

from __future__ import annotations

from megatron_ds.config.fields import Decides, option_field
from megatron_ds.dataclass import dataclass
from megatron_ds.presets import PRESETS

MEGATRON = {"auto": "auto", "flash": "flash", "fused": "cudnn", "unfused": "math", "local": "math"}
"""The kernels of attention by Megatron's names."""


@dataclass(frozen=True)
class RuntimeConfig:
    """Files of settings, seed, process groups and compilation."""

    DECIDES = Decides.OPERATION

    config: tuple[str, ...] | None = option_field(
        None,
        nargs="*",
        metavar="FILE",
        repeatable=True,
        decides=Decides.RUN,
        common=True,
    )
    """YAML files of settings: flags without dashes as keys, see docs/training/configuration.md.
    Later files override earlier ones, and flags override files."""
    preset: str | None = option_field(None, choices=PRESETS, decides=Decides.RUN, common=True)
    """Architecture of a public model, which --config and flags override; its vocabulary size yields
    to the tokenizer's."""
    print_config: bool = option_field(False, decides=Decides.RUN, common=True)
    """Print the settings, defaults included, as a file for --config, and exit; neither data nor
    machine are checked."""
    dry_run: int | None = option_field(None, minimum=1, decides=Decides.RUN, common=True)
    """Check the settings for N processes, print what such a run will need and take, and exit;
    tools/plan.py has more options."""
    seed: int = option_field(
        1234, minimum=0, below=1 << 32, decides=Decides.INITIAL_VALUES | Decides.SAMPLES
    )
    """Random seed of weights, data order and dropout."""
    distributed_backend: str | None = option_field(None, choices=("nccl", "gloo", "ccl", "hccl"))
    """Backend of torch.distributed (default: the accelerator's); with gloo, ranks may share a
    device."""
    distributed_timeout_minutes: float = option_field(10.0, above=0)
    """Timeout of collective operations in minutes."""
    hang_timeout: float | None = option_field(None, above=0)
    """Seconds without a step, or a part of an evaluation, after which all ranks write where they
    are, and the run ends (default: no limit)."""
    host_timeout: float = option_field(60.0, above=0)
    """Seconds without a sign of life of another host after which the run ends; at least 60 until
    training has started."""
    memory_check: str = option_field("error", choices=("error", "warn", "off"))
    """What to do if the estimated memory of the host, or that of the states on the device, is more
    than there is: end with an error, only warn, or do not compare."""
    compile: bool = option_field(False, decides=Decides.LAYOUT)
    """Compile each layer with torch.compile (output layer and loss are already fused); the default
    on an accelerator with Triton, where the banner says what is compiled."""
    no_compile: bool = option_field(False, decides=Decides.LAYOUT)
    """Compile nothing with torch.compile, on an accelerator either."""
    attention_backend: str = option_field(
        "auto",
        choices=("auto", "flash", "cudnn", "efficient", "math"),
        synonyms={
            **{name: value for name, value in MEGATRON.items() if name != value},
            **{f"AttnBackend.{name}": value for name, value in MEGATRON.items()},
        },
        decides=Decides.LAYOUT,
    )
    """Kernel of scaled_dot_product_attention that trains on an accelerator: auto takes the first of
    cudnn, flash, efficient and math that can, without cudnn where lengths vary, or kernels for
    documents and ALiBi; the CPU has one of its own."""
    tf32: bool = option_field(False, decides=Decides.FUNCTION)
    """Multiply fp32 matrices in TF32 on devices that have it: several times faster, with 10 instead
    of 23 bits of each factor's mantissa (no effect on CPUs)."""
    deterministic_mode: bool = option_field(False, decides=Decides.LAYOUT)
    """Use torch's deterministic algorithms, so that accelerators repeat a run bit for bit, which is
    slower; runs on CPUs always do."""
