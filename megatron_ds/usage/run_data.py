"""The training data of a run, built again from what its starts have recorded in events.jsonl."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ds import schedules
from megatron_ds.checkpoint.compatibility import config_of
from megatron_ds.checkpoint.lineage import parent_of
from megatron_ds.checkpoint.location import Location, RunFolders
from megatron_ds.config import Config
from megatron_ds.config.phases import phase_names
from megatron_ds.config.problems import raise_if_any, user_error
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.reports.history import RunReader
from megatron_ds.run_phases import RunPhases
from megatron_ds.tokenizer import Tokenizer
from megatron_ds.train_state import TrainState
from megatron_ds.training.replay.recorded_run import restricted
from megatron_ds.training.start.data_length import open_data
from megatron_ds.training.start.preflight import RunInputs, check_tokenizer
from megatron_ds.training.start.run_data import build_phase_data
from megatron_ds.usage.steps import Steps


class RunData:
    """The training data of a run, and of the runs that it continues.

    Args:
        folder: Its --save folder.
        trusts_files: Files outside of the folder are read where the record names them.
        trusts_code: Python code of the tokenizer may run.
    """

    def __init__(self, folder: Path, *, trusts_files: bool, trusts_code: bool) -> None:
        reader = RunReader(folder)
        reader.read()
        steps = reader.history["iteration"]
        self.folder = folder
        self.last = int(steps[-1]) if len(steps) else 0
        self._trusts_files = trusts_files
        self._trusts_code = trusts_code
        self.starts = _starts(folder, is_trusted=trusts_files)
        self._temporary = tempfile.TemporaryDirectory()
        self._excluded = Path(self._temporary.name, "excluded.txt")

    def of_step(self, step: int) -> Steps:
        """The steps with a step.

        Raises:
            UserError: If it is not known what the step reads.
        """
        for steps in self.steps(step, step):
            if steps.first <= step < steps.first + steps.count:
                return steps
        raise user_error("step-without-start", "step", step=step, run=self.folder)

    def steps(self, first: int, last: int) -> Iterator[Steps]:
        """The steps of the run, at least those from `first` to `last` that are known."""
        ends = [start["iteration"] for start in self.starts[1:]] + [last]
        for start, end in zip(self.starts, ends, strict=True):
            if first <= end and start["iteration"] < last:
                for steps in self._of_start(start):
                    if steps.first > end:
                        break
                    count = min(steps.count, end + 1 - steps.first)
                    yield dataclasses.replace(steps, count=count)

    def _of_start(self, start: dict[str, Any]) -> Iterator[Steps]:
        """The steps that a start of the run would have made if the run had not ended."""
        config = self._settings_of(start)
        tokenizer = _tokenizer_of(config)
        files = tuple(open_data(phase.data) for phase in config.phase_configs)
        phases = RunPhases(config, config.parallel.data_parallel_size(start["ranks"]))
        history: BlendHistory | None = None
        if recorded := start.get("data"):
            history = BlendHistory.from_dict(recorded)
        state = TrainState.from_dict(start["state"]) if "state" in start else TrainState()
        names = phase_names(config) or [""]
        progress = None
        inputs = RunInputs(LoadPlan(RunFolders(Location(self.folder))), tokenizer, files)
        for before in phases.starts(state):
            if progress is not None:
                history = progress.history_after(before.consumed_samples)
            data = build_phase_data(config, inputs, phases.dp_size, before, history)
            progress = data.progress
            phase = phases.at(before)
            assert data.train is not None
            step = before.iteration + 1
            sample = before.consumed_samples
            at = before.of_stage if config.schedule.stages else before
            for segment in schedules.constant_segments(phase, phases.dp_size, at):
                yield Steps(
                    first=step,
                    count=segment.steps,
                    first_sample=sample,
                    segment=segment,
                    config=phase,
                    phase=names[before.stage],
                    ranks=start["ranks"],
                    dataset=data.train,
                    files=files[before.stage],
                    tokenizer=tokenizer,
                )
                step += segment.steps
                sample += segment.steps * segment.batch_size

    def _settings_of(self, start: dict[str, Any]) -> Config:
        """The settings of a start, with the documents that it excluded.

        Raises:
            UserError: If the start lacks what its steps depend on, or its settings name files or
                code that are not trusted.
        """
        config = config_of(start["config"])
        if (text := start.get("excluded")) is not None:  # the file may have changed
            self._excluded.write_text(text, encoding="utf-8")
            config = config.with_values({"exclude_documents": str(self._excluded)})
        if start["iteration"] and "state" not in start:  # of an older version
            raise user_error("start-without-state", "step", iteration=start["iteration"])
        replaced = {"load", "pretrained_checkpoint"}  # which are not read
        if text is not None:
            replaced.add("exclude_documents")
        if self._trusts_code:
            replaced.add("trust_remote_code")
        folder = Path(self._temporary.name)
        return restricted(
            config, self.folder, folder, replaced=replaced, is_trusted=self._trusts_files
        )


def _tokenizer_of(config: Config) -> Tokenizer:
    """The tokenizer of a run.

    Raises:
        UserError: If it cannot be built.
    """
    is_null = config.tokenizer.tokenizer_type == "NullTokenizer"  # it adds a token
    sized = config.with_vocab(config.model.vocab_size - is_null)
    tokenizer, problems = check_tokenizer(sized, True)
    raise_if_any(problems)
    assert tokenizer is not None
    return tokenizer


def _starts(
    folder: Path, *, is_trusted: bool, before: float = float("inf")
) -> list[dict[str, Any]]:
    """The starts that have made the steps of a run, in order, including the starts of its parents.

    Args:
        folder: --save folder of the run.
        is_trusted: A parent that the record names is read.
        before: Time of the first start that is left out.
    """
    reader = RunReader(folder)
    reader.read()
    starts: list[dict[str, Any]] = []
    for event in reader.history.of("start"):
        if event["time"] < before:  # those from later iterations have been repeated
            starts = [one for one in starts if one["iteration"] < event["iteration"]] + [event]
    if not starts or not (first := starts[0]["iteration"]):
        return starts
    parent, _ = parent_of(folder) or (starts[0]["config"]["checkpoint"]["load"], first)
    if not parent or not Path(parent).is_dir() or os.path.samefile(parent, folder):
        return starts
    if not is_trusted:
        raise user_error("recorded-files-not-trusted", files=parent, run=folder)
    earlier = _starts(Path(parent), is_trusted=True, before=starts[0]["time"])
    return [one for one in earlier if one["iteration"] < first] + starts
