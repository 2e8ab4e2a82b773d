"""Translates the `curriculum_learning` block of a DeepSpeed file into our flags.

Older DeepSpeed versions truncated samples by it; the installed one rejects the block, which is
therefore not passed on. Only the schedule of Megatron-DeepSpeed's files is supported: sequence
length, fixed_linear. Does not know which flags were given.
Source: deepspeed.runtime.data_pipeline.curriculum_scheduler
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.config.problems import Problem, option
from megatron_ds.engine.ds_config_file import DeepSpeedFile

BLOCK = "curriculum_learning"
CONFIG = f"{BLOCK}.schedule_config"
LENGTHS = (
    f"{BLOCK}.min_difficulty",
    f"{BLOCK}.max_difficulty",
    f"{CONFIG}.total_curriculum_step",
)
"""Keys of the three values of --curriculum-seqlen."""
STEP = f"{CONFIG}.difficulty_step"


def lengths(file: DeepSpeedFile) -> tuple[int, int, int] | None:
    """The value of --curriculum-seqlen; None without a block that can be translated."""
    if file.get(BLOCK) is None or any(problems(file)):
        return None
    start, end, steps = (int(file.get(key)) for key in LENGTHS)
    return start, end, steps


def problems(file: DeepSpeedFile) -> Iterator[Problem]:
    """Find out why a block cannot be translated."""
    if file.get(BLOCK) is None:
        return
    if file.get(f"{BLOCK}.enabled") is None:
        yield _incomplete(file, '"enabled": true (or false, DeepSpeed\'s default)')
    for name, supported in (("curriculum_type", "seqlen"), ("schedule_type", "fixed_linear")):
        key = f"{BLOCK}.{name}"
        kind = file.get(key)
        if kind is None:
            yield _incomplete(file, f'"{name}": "{supported}"')
        elif kind != supported:
            reason = f"only {supported!r} is supported; use {option('curriculum_seqlen')}"
            yield file.invalid(key, reason, "curriculum_seqlen")
            return
    missing = [key for key in (*LENGTHS, STEP) if file.get(key) is None]
    for key in missing:
        yield _incomplete(file, key)
    if missing:
        return
    end, step = int(file.get(LENGTHS[1])), int(file.get(STEP))
    if step > 0 and end % step:
        reason = (
            f"not a multiple of difficulty_step {step}; DeepSpeed stops at {end - end % step}, "
            "write that"
        )
        yield file.invalid(LENGTHS[1], reason, "curriculum_seqlen", "curriculum_seqlen_step")


def _incomplete(file: DeepSpeedFile, missing: str) -> Problem:
    return Problem(
        "ds-curriculum-incomplete", location=file.location(BLOCK), block=BLOCK, missing=missing
    )
