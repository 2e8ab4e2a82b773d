"""Lengths of the learning rate schedule, converted to its unit.

A length may be given in iterations, samples or tokens. Iterations become samples by the final
global batch size, as in Megatron. Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ds.config import Config
from megatron_ds.config.problems import option


@dataclass(frozen=True)
class ScheduleLength:
    """A length of the schedule as the user gave it."""

    field: str
    value: int

    @property
    def unit(self) -> str:
        """ "iters", "samples" or "tokens"."""
        return self.field.rpartition("_")[2]

    @property
    def stem(self) -> str:
        """Field without the unit: "train", "lr_decay", "lr_warmup" or "lr_wsd_decay"."""
        return self.field.rpartition("_")[0]

    def __str__(self) -> str:
        return f"{option(self.field)} {self.value}"


def given_length(config: Config, stem: str) -> ScheduleLength | None:
    """The length `<stem>_<unit>`; `Config.problems` ensures that at most one unit is given."""
    for name in config.schedule.given_lengths(stem):
        return ScheduleLength(name, getattr(config.schedule, name))
    return None


def decay_as_given(config: Config) -> ScheduleLength | None:
    """The length that ends the decay: its own, or the run length."""
    given = given_length(config, "lr_decay")
    if given is not None:
        return given
    tokens = config.schedule.train_tokens
    if lr_unit(config) == "tokens" and tokens is not None:
        return ScheduleLength("train_tokens", tokens)
    return given_length(config, "train")


def lr_unit(config: Config) -> str:
    """Unit of the learning rate schedule, "tokens" or "samples".

    It is tokens if any of its lengths is given in tokens, or if only the run length is, which then
    ends the decay.
    """
    schedule = config.schedule
    if schedule.lr_decay_tokens or schedule.lr_warmup_tokens or schedule.lr_wsd_decay_tokens:
        return "tokens"
    ends = (*schedule.given_lengths("lr_decay"), schedule.train_iters, schedule.train_samples)
    return "samples" if any(ends) else "tokens"


def in_lr_units(config: Config, length: ScheduleLength, dp_size: int) -> int:
    """Convert a length to `lr_unit`."""
    if length.unit == lr_unit(config):
        return length.value
    samples = length.value
    if length.unit == "iters":
        samples *= config.final_global_batch_size(dp_size)
    if lr_unit(config) == "samples":
        return samples
    # With a curriculum, samples differ in length; validation then requires all lengths in tokens.
    return samples * config.model.seq_length


def run_samples(config: Config, dp_size: int) -> int | None:
    """Samples of the run from --train-iters or --train-samples; None if only tokens are given."""
    schedule = config.schedule
    if schedule.train_iters is not None:
        return schedule.train_iters * config.final_global_batch_size(dp_size)
    return schedule.train_samples


def decay_length(config: Config, dp_size: int) -> int:
    """End of the decay in `lr_unit`, counted from the start of the run (warmup included)."""
    given = decay_as_given(config)
    assert given is not None
    return in_lr_units(config, given, dp_size)


def warmup_length(config: Config, dp_size: int) -> float:
    """Warmup in `lr_unit`; not an integer in general if given as a fraction."""
    if config.schedule.lr_warmup_fraction is not None:
        return config.schedule.lr_warmup_fraction * decay_length(config, dp_size)
    given = given_length(config, "lr_warmup")
    return 0 if given is None else in_lr_units(config, given, dp_size)


def wsd_decay_length(config: Config, dp_size: int) -> int:
    """Annealing phase of WSD in `lr_unit`, at the end of the decay."""
    given = given_length(config, "lr_wsd_decay")
    assert given is not None
    return in_lr_units(config, given, dp_size)
