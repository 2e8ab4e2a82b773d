"""Options of batch size, run length, sequence length and learning rate schedule."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from megatron_ds.config.fields import ANY_VALUE, UNSET_INT, option_field, when

SCHEDULE_UNITS = ("iters", "samples", "tokens")
"""Units in which a length of the schedule can be given."""
SCHEDULE_LENGTHS = {
    "lr_decay": "the length of the decay",
    "lr_warmup": "the length of the warmup",
    "lr_wsd_decay": "the length of the WSD decay",
}
"""Lengths of the learning rate schedule; each has one field per unit."""
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

DECAY_STYLES = ("linear", "cosine", "inverse-square-root", "WSD")
WSD = when(lr_decay_style="WSD")


@dataclass(frozen=True)
class ScheduleConfig:
    """Batch size, run length and learning rate schedule."""

    micro_batch_size: int = option_field(
        UNSET_INT,
        "batch size of one forward pass of one data-parallel rank, in samples",
        aliases=("batch-size",),
        required=True,
        minimum=1,
    )
    global_batch_size: int | None = option_field(
        None,
        "samples per optimizer step (default: micro-batch size x data-parallel size)",
        minimum=1,
    )
    rampup_batch_size: tuple[int, int, int] | None = option_field(
        None,
        "START INCREMENT SAMPLES: increase the global batch size linearly from START, by INCREMENT "
        "each time, to --global-batch-size over SAMPLES samples",
        nargs=3,
        metavar="N",
    )
    step_batch_size_schedule: tuple[str, ...] | None = option_field(
        None,
        "0:BATCH TOKENS:BATCH ...: global batch size from each number of consumed tokens; the "
        "suffixes K, M, B and T are 1e3, 1e6, 1e9 and 1e12",
        nargs="*",
        metavar="TOKENS:BATCH",
    )
    curriculum_seqlen: tuple[int, int, int] | None = option_field(
        None,
        "START END STEPS: increase the sequence length linearly from START to END tokens over "
        "STEPS iterations; samples are truncated to it, and the rest is not trained on",
        nargs=3,
        metavar="N",
    )
    curriculum_seqlen_step: int = option_field(
        8,
        "the sequence length is a multiple of this value (DeepSpeed's difficulty_step)",
        minimum=1,
        only_with=when(curriculum_seqlen=ANY_VALUE),
    )
    train_iters: int | None = option_field(None, "run length in iterations", minimum=1)
    train_samples: int | None = option_field(None, "run length in samples", minimum=1)
    train_tokens: int | None = option_field(
        None,
        "run length in tokens: the run ends with the step that reaches it, or earlier with "
        "--train-iters or --train-samples",
        minimum=1,
    )
    lr_decay_style: str = option_field(
        "linear", "learning rate schedule after warmup", choices=("constant", *DECAY_STYLES)
    )
    lr_decay_iters: int | None = option_field(
        None,
        "number of iterations to decay the learning rate over (default: --train-iters)",
        minimum=1,
    )
    lr_decay_samples: int | None = option_field(
        None,
        "number of samples to decay the learning rate over (default: --train-samples)",
        minimum=1,
    )
    lr_decay_tokens: int | None = option_field(
        None,
        "number of tokens to decay the learning rate over (default: --train-tokens)",
        minimum=1,
    )
    lr_warmup_iters: int = option_field(0, "linear warmup in iterations", minimum=0)
    lr_warmup_samples: int = option_field(0, "linear warmup in samples", minimum=0)
    lr_warmup_tokens: int | None = option_field(None, "linear warmup in tokens", minimum=0)
    lr_warmup_fraction: float | None = option_field(
        None, "linear warmup as a fraction of the decay", minimum=0, maximum=1
    )
    lr_warmup_init: float = option_field(0.0, "learning rate at the start of warmup", minimum=0)
    min_lr: float = option_field(
        0.0,
        "minimum learning rate after warmup",
        minimum=0,
        only_with=when(lr_decay_style=DECAY_STYLES),
    )
    lr_wsd_decay_style: str = option_field(
        "exponential",
        "decay style of the annealing phase of WSD",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
        only_with=WSD,
    )
    lr_wsd_decay_iters: int | None = option_field(
        None, "annealing phase of WSD in iterations", minimum=1, only_with=WSD
    )
    lr_wsd_decay_samples: int | None = option_field(
        None, "annealing phase of WSD in samples", minimum=1, only_with=WSD
    )
    lr_wsd_decay_tokens: int | None = option_field(
        None, "annealing phase of WSD in tokens", minimum=1, only_with=WSD
    )

    @property
    def batch_size_steps(self) -> tuple[tuple[int, int], ...]:
        """--step-batch-size-schedule as (tokens, batch size), without malformed entries."""
        parsed = map(parse_batch_size_step, self.batch_size_entries)
        return tuple(entry for entry in parsed if entry is not None)

    @property
    def batch_size_entries(self) -> list[str]:
        """The entries of --step-batch-size-schedule, separated by spaces or commas."""
        return " ".join(self.step_batch_size_schedule or ()).replace(",", " ").split()

    def given_lengths(self, stem: str) -> list[str]:
        """The fields of a length (train, lr_decay, lr_warmup, lr_wsd_decay) that are set."""
        return [name for unit in SCHEDULE_UNITS if getattr(self, name := f"{stem}_{unit}")]


def parse_batch_size_step(entry: str) -> tuple[int, int] | None:
    """Parse `250B:1536` into (250_000_000_000, 1536); None if malformed."""
    form = r"([0-9]{1,18}(?:\.[0-9]{1,12})?)([KMBT]?):([0-9]{1,18})"
    match = re.fullmatch(form, entry.upper())
    if match is None or int(match[3]) < 1:
        return None
    tokens = Fraction(match[1]) * SUFFIXES[match[2]]
    return (int(tokens), int(match[3])) if tokens.denominator == 1 else None
