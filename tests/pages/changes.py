"""The page docs/reference/changes.md, from what each option declares that it decides."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import Path

from megatron_ds.config import GROUPS, fields_in_phase, fields_that_decide, flag_of
from megatron_ds.config.fields import Decides, InPhase, option_fields
from megatron_ds.training.replay.one_process import DROPPED

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT = REPOSITORY / "docs" / "reference" / "changes.md"
HEAD = """\
# What may change

For people who continue a run with another flag: what that does on a resume, in a stage of
`--stages`, in a fork (`tools/fork.py`) and in a replay (`tools/verify_run.py`).

Written by `python -m tests.pages` from the declarations of the options (`Decides` and `InPhase` in
`megatron_ds/config/fields.py`), which the program itself asks. A value counts only if the flag has
an effect next to the other flags.

| a flag that decides | on a resume | in a fork | in a replay |
|---|---|---|---|
"""
MEANING = {
    Decides.WEIGHTS: ("names, shapes and meaning of the weights", "is an error"),
    Decides.ROTATION: ("rotary positions", "is an error without `--override-rope`"),
    Decides.TOKENS: (
        "token ids of a text",
        "is an error if the tokenizer gives other ids than the checkpoint's",
    ),
    Decides.SAMPLES: (
        "samples of a step and their order",
        "is an error, unless the history of the data admits it "
        "([blends](../data/blends.md#changing-the-blend-on-resume))",
    ),
    Decides.CONTENT: ("what is made of a sample", "is reported"),
    Decides.FUNCTION: ("what the model computes, also in evaluation", "is reported"),
    Decides.TRAINING: ("what else a training step computes", "is reported"),
    Decides.SCHEDULE: (
        "learning rate and weight decay over the run",
        "is reported without `--override-opt_param-scheduler`; "
        "`--use-checkpoint-opt_param-scheduler` takes the checkpoint's",
    ),
    Decides.INITIAL_VALUES: ("values with which a run begins", "has no effect"),
    Decides.LAYOUT: ("layout, memory and speed", "is free: the run learns the same"),
    Decides.OPERATION: ("logs, saves, evaluations, the end of the run", "is free"),
    Decides.RUN: ("files and start of one run", "is free"),
}
"""By kind what it is, and what another value does on a resume."""
IN_PHASE = (
    "An entry of `--stages` may replace {replaced}.",
    "Set in entries only, because they count from the start of a stage: {counted}. All other flags "
    "have one value for the run.",
)


def page() -> str:
    """The text of the page."""
    rows = "".join(
        f"| {meaning} | {resume} | {_in_fork(kind)} | {_in_replay(kind)} |\n"
        for kind, (meaning, resume) in MEANING.items()
    )
    sections = "".join(
        f"## {meaning[0].upper()}{meaning[1:]}\n\n{_filled(_flags(fields_that_decide(kind)))}.\n\n"
        for kind, (meaning, _) in MEANING.items()
    )
    replaced = _flags(fields_in_phase(InPhase.REPLACED))
    counted = _flags(fields_in_phase(InPhase.COUNTED))
    in_phase = "\n\n".join(
        _filled(paragraph.format(replaced=replaced, counted=counted)) for paragraph in IN_PHASE
    )
    return f"{HEAD}{rows}\n{sections}## In a stage\n\n{in_phase}\n"


def _in_fork(kind: Decides) -> str:
    return "is not taken over" if kind is Decides.RUN else "as on a resume"


def _in_replay(kind: Decides) -> str:
    if kind not in DROPPED:
        return "the run's"
    caches = ", except for caches of token files" if kind is Decides.LAYOUT else ""
    return f"the default, as one process{caches}"


def _flags(names: Iterable[str]) -> str:
    """The flags of some fields, in the order of --help-all."""
    ordered = (item.name for group in GROUPS.values() for item, _ in option_fields(group))
    chosen = {*names}
    return ", ".join(f"`{flag_of(name)}`" for name in ordered if name in chosen)


def _filled(text: str) -> str:
    return textwrap.fill(text, 100, break_on_hyphens=False, break_long_words=False)
