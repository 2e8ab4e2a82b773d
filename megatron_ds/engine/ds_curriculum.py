"""The curriculum_learning block of a DeepSpeed file in the words of the flags.

Older DeepSpeeds cut samples by it; the installed one refuses it, and it never gets there. What is
translated is the course that all of Megatron-DeepSpeed's files have: sequence length, fixed_linear.
Knows what the keys mean, not what flags were given.
Source: deepspeed.runtime.data_pipeline.curriculum_scheduler
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.engine.ds_config_file import DeepSpeedFile

BLOCK = "curriculum_learning"
CONFIG = f"{BLOCK}.schedule_config"
LENGTHS = (
    f"{BLOCK}.min_difficulty",
    f"{BLOCK}.max_difficulty",
    f"{CONFIG}.total_curriculum_step",
)
"""The keys of --curriculum-seqlen's three values."""
STEP = f"{CONFIG}.difficulty_step"


def lengths(file: DeepSpeedFile) -> tuple[int, int, int] | None:
    """The block's --curriculum-seqlen; None without a block that can be translated."""
    if file.get(BLOCK) is None or any(problems(file)):
        return None
    start, end, steps = (int(file.get(key)) for key in LENGTHS)
    return start, end, steps


def problems(file: DeepSpeedFile) -> Iterator[str]:
    """Why a block cannot be what the run does."""
    if file.get(BLOCK) is None:
        return
    place = file.location(BLOCK)
    if file.get(f"{BLOCK}.enabled") is None:
        yield f'{place}: {BLOCK} needs "enabled": true (or false, as DeepSpeed takes it without)'
    for key, known in (("curriculum_type", "seqlen"), ("schedule_type", "fixed_linear")):
        kind = file.get(f"{BLOCK}.{key}")
        if kind is None:
            yield f'{place}: {BLOCK} needs "{key}": "{known}"'
        elif kind != known:
            yield (
                f"{file.location(f'{BLOCK}.{key}')}: {BLOCK}.{key} {kind!r} is not supported: "
                f"{known!r} alone is; leave the block out, or give --curriculum-seqlen instead"
            )
            return
    missing = [key for key in (*LENGTHS, STEP) if file.get(key) is None]
    for key in missing:
        yield f"{place}: {BLOCK} needs {key}"
    if missing:
        return
    end, step = int(file.get(LENGTHS[1])), int(file.get(STEP))
    if step > 0 and end % step:
        yield (
            f"{file.location(LENGTHS[1])}: {LENGTHS[1]} {end} is not a multiple of difficulty_step "
            f"{step}: DeepSpeed ends at {end - end % step}; write that"
        )
