"""Show which documents the steps of a run have read, and which steps have read a document."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds import cli, schedules
from megatron_ds.checkpoint.compatibility import config_of
from megatron_ds.checkpoint.lineage import parent_of
from megatron_ds.checkpoint.location import Location, RunFolders
from megatron_ds.cli.inspection import Inspection
from megatron_ds.config import Config
from megatron_ds.config.checks import file_problems
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import (
    Problem,
    counted,
    raise_if_any,
    renaming_fields,
    user_error,
)
from megatron_ds.config.stages import stage_names
from megatron_ds.data.blend.blend_history import BlendHistory
from megatron_ds.data.gpt_dataset import Piece, TokenDataset
from megatron_ds.data.validation import DataFiles
from megatron_ds.launch.output import print_error
from megatron_ds.loading import fork
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.reports.history import RunReader, run_problems
from megatron_ds.run_stages import RunStages
from megatron_ds.tokenizer import Tokenizer
from megatron_ds.train_state import TrainState
from megatron_ds.training.recorded_run import restricted
from megatron_ds.training.start.data_length import open_data
from megatron_ds.training.start.preflight import RunInputs, check_tokenizer
from megatron_ds.training.start.run_data import build_stage_data


@dataclass(frozen=True)
class Options:
    """Shows the documents that a step of a run has read, or the steps that have read a document.

    The samples are found again from what the starts of the run have recorded in events.jsonl, with
    the token files that it has read. A document is named by its file and its number in the file,
    from 0: web:17, or data/web:17 if several files have this name.
    """

    run: str = option_field(
        "", "--save folder of the run", metavar="RUN", positional=True, required=True
    )
    step: int | None = option_field(None, "iteration whose documents are shown", minimum=1)
    rank: int | None = option_field(None, "show the samples of this rank only", minimum=0)
    document: str | None = option_field(
        None, "document whose steps are shown", metavar="FILE:NUMBER"
    )
    max_tokens: int | None = option_field(
        None, "truncate the shown parts of documents to this length", minimum=1
    )
    json: bool = option_field(False, "print one JSON object")
    exclude: str | None = option_field(
        None,
        "fork the run at the checkpoint of --step, without the documents of this file: "
        "FILE:NUMBER or FILE:FIRST-LAST on each line",
        metavar="FILE",
    )
    save: str | None = option_field(None, "new folder of the fork", metavar="FOLDER")
    trust_recorded_files: bool = option_field(
        False, "read the files outside of the run's folder that its record names"
    )
    trust_remote_code: bool = option_field(
        False, "run the Python code of the run's tokenizer, if it has some"
    )

    def problems(self) -> Iterator[Problem]:
        yield from run_problems("run", (self.run,))
        if (self.exclude is None) != (self.save is None) or (self.exclude and not self.step):
            yield Problem("exclude-needs-step-and-folder", "exclude", "step", "save")
        elif self.exclude is not None:
            yield from file_problems("exclude", self.exclude)
        if (self.step is None) == (self.document is None):
            yield Problem("step-or-document", "step", "document")
        if self.document is not None and not re.fullmatch(r".+:\d+", self.document):
            yield Problem("document-syntax", "document", text=self.document)
        if self.rank is not None and self.step is None:
            yield Problem("rank-without-step", "rank", "step")


@dataclass(frozen=True)
class Steps:
    """Consecutive steps of a run with the same data, batch size and layout."""

    first: int
    count: int
    first_sample: int
    segment: schedules.ConstantSegment
    config: Config
    """Of their stage."""
    stage: str
    ranks: int
    dataset: TokenDataset
    files: DataFiles
    tokenizer: Tokenizer

    def samples(self, step: int) -> range:
        """Positions of the samples of a step in the data order."""
        size = self.segment.batch_size
        first = self.first_sample + (step - self.first) * size
        return range(first, first + size)

    def step_of(self, position: int) -> int | None:
        """The step that reads a sample, if it is one of these."""
        index = (position - self.first_sample) // self.segment.batch_size
        return self.first + index if 0 <= index < self.count else None

    def pieces(self, position: int) -> Iterator[Piece]:
        """Where the tokens of a sample come from, less those that a curriculum leaves out."""
        end = self.segment.seq_length + 1
        for piece in self.dataset.pieces(position):
            if (part := piece.cut(0, end)).size > 0:
                yield part
            end -= piece.size

    @property
    def dp_size(self) -> int:
        return self.config.parallel.data_parallel_size(self.ranks)

    def dp_rank(self, position: int) -> int:
        """The data-parallel rank that reads a sample."""
        micro_batch = (position - self.first_sample) // self.config.schedule.micro_batch_size
        return micro_batch % self.dp_size

    def dp_rank_of(self, rank: int) -> int:
        """The data-parallel rank of a rank."""
        from megatron_ds.parallel.mesh import axis_groups  # imports torch

        if rank >= self.ranks:
            raise user_error("rank-beyond-run", "rank", rank=rank, last=self.ranks - 1)
        groups = axis_groups(self.ranks, **self.config.axis_sizes)["dp"]
        return next(group.index(rank) for group in groups if rank in group)


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
        self.folder, self.last = folder, int(steps[-1]) if len(steps) else 0
        self._trusts_files, self._trusts_code = trusts_files, trusts_code
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
        """The steps that a start of the run would have made without an end."""
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
        config = restricted(
            config, self.folder, folder, replaced=replaced, is_trusted=self._trusts_files
        )
        is_null = config.tokenizer.tokenizer_type == "NullTokenizer"  # it adds a token
        sized = config.with_vocab(config.model.vocab_size - is_null)
        tokenizer, problems = check_tokenizer(sized, True)
        raise_if_any(problems)
        assert tokenizer is not None
        files = tuple(open_data(stage.data) for stage in config.stage_configs)
        stages = RunStages(config, config.parallel.data_parallel_size(start["ranks"]))
        history: BlendHistory | None = None
        if recorded := start.get("data"):
            history = BlendHistory.from_dict(recorded)
        state = TrainState.from_dict(start["state"]) if "state" in start else TrainState()
        names, progress = stage_names(config) or [""], None
        inputs = RunInputs(LoadPlan(RunFolders(Location(self.folder))), tokenizer, files)
        for before in stages.starts(state):
            if progress is not None:
                history = progress.history_after(before.consumed_samples)
            data = build_stage_data(config, inputs, stages.dp_size, before, history)
            progress, stage = data.progress, stages.at(before)
            assert data.train is not None
            step, sample = before.iteration + 1, before.consumed_samples
            at = before.of_stage if config.schedule.stages else before
            for segment in schedules.constant_segments(stage, stages.dp_size, at):
                facts = stage, names[before.stage], start["ranks"], data.train
                inputs_of = files[before.stage], tokenizer
                yield Steps(step, segment.steps, sample, segment, *facts, *inputs_of)
                step, sample = step + segment.steps, sample + segment.steps * segment.batch_size


def _starts(
    folder: Path, *, is_trusted: bool, before: float = float("inf")
) -> list[dict[str, Any]]:
    """The starts that have made the steps of a run, in their order, with those of its parents.

    Args:
        folder: Of the run.
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


@dataclass(frozen=True)
class Part:
    """Consecutive tokens of a document in a sample."""

    prefix: str
    document: int
    first: int
    """Position of the first of them in the document."""
    ids: list[int]
    is_first: bool
    """Whether the sample begins with them: the first token is not a label."""
    is_last: bool
    """Whether it ends with them: the last token is a label only."""

    def __contains__(self, role: tuple[int, bool]) -> bool:
        """Whether a token of the document is an input, or a label, of the sample."""
        token, is_input = role
        first = self.first + (self.is_first and not is_input)
        return first <= token < self.first + len(self.ids) - (self.is_last and is_input)

    @property
    def role(self) -> tuple[int, bool]:
        """The first token, as an input or, if it is none, as a label."""
        return self.first, (self.first, True) in self


def parts_of(steps: Steps, position: int) -> list[Part]:
    """The parts of documents of a sample."""
    parts: list[Part] = []
    for piece in steps.pieces(position):
        file = steps.files.open(piece.prefix)
        document = int(np.searchsorted(file.document_index, piece.sequence, side="right")) - 1
        before = file.lengths[int(file.document_index[document]) : piece.sequence]
        first = int(before.sum(dtype=np.int64)) + piece.first
        ids = file.get(piece.sequence)[piece.first : piece.first + piece.size].tolist()
        last = parts[-1] if parts else None
        is_next = last is not None and (last.prefix, last.document) == (piece.prefix, document)
        if last is not None and is_next and last.first + len(last.ids) == first:
            parts[-1] = dataclasses.replace(last, ids=last.ids + ids)
        else:
            parts.append(Part(piece.prefix, document, first, ids, not parts, is_last=False))
    return [*parts[:-1], *(dataclasses.replace(part, is_last=True) for part in parts[-1:])]


class UsageInspection(Inspection):
    """What a step has read, or who has read a document."""

    def __init__(self, options: Options) -> None:
        super().__init__(as_json=options.json)
        self._options = options
        self._run = RunData(
            Path(options.run),
            trusts_files=options.trust_recorded_files,
            trusts_code=options.trust_remote_code,
        )

    def run(self) -> int:
        """Prints it, and returns the exit status."""
        if self._options.exclude is not None:
            self._fork(self._options.exclude)
        elif self._options.step is not None:
            self._show_step(self._options.step)
        else:
            name, _, index = (self._options.document or "").rpartition(":")
            self._show_document(name, int(index))
        return self.finish()

    def _fork(self, excluded: str) -> None:
        options, path = self._options, os.path.abspath(excluded)
        assert options.step is not None
        assert options.save is not None
        settings = Config().with_values({"exclude_documents": path})
        names = frozenset({"run", "at", "save", "exclude_documents"})
        with renaming_fields(at="step"):
            request = fork.Options(options.run, options.step, options.save, settings, names)
            command = fork.fork(request, lambda problem: print_error(problem.render()))
        self.found |= {"fork": options.save, "command": command}
        self.show(f"wrote {options.save}, a fork of {options.run}; start it by", f"    {command}")

    def _show_step(self, step: int) -> None:
        steps, rank = self._run.of_step(step), self._options.rank
        dp_rank = None if rank is None else steps.dp_rank_of(rank)
        samples = steps.samples(step)
        shown = [one for one in samples if dp_rank in (None, steps.dp_rank(one))]
        stage = f" of stage {steps.stage}" if steps.stage else ""
        of_rank = "" if rank is None else f", {len(shown)} of them on rank {rank}"
        state = "" if step <= self._run.last else ", which the run has not made yet"
        self.show(
            f"step {step}{stage}{state}: samples {samples[0]} to {samples[-1]}{of_rank}, "
            f"{counted(steps.segment.seq_length, 'token')} each"
        )
        entries: list[dict[str, Any]] = []
        for position in shown:
            parts = parts_of(steps, position)
            if not parts:
                raise user_error("run-without-documents", "run", run=self._run.folder)
            self.show(f"--- sample {position}, data-parallel rank {steps.dp_rank(position)}")
            documents = [self._described(steps, part) for part in parts]
            rank_of = steps.dp_rank(position)
            entries.append({"position": position, "dp_rank": rank_of, "documents": documents})
        self.found |= {"step": step, "stage": steps.stage, "samples": entries}

    def _described(self, steps: Steps, part: Part) -> dict[str, Any]:
        name = f"{os.path.basename(part.prefix)}:{part.document}"
        ids = part.ids[: self._options.max_tokens]
        last = part.first + len(part.ids) - 1
        text = steps.tokenizer.decode(ids)
        self.show(f"{name} ({part.prefix}), tokens {part.first} to {last}:", f"    {text!r}")
        values = {"prefix": part.prefix, "first": part.first, "tokens": len(part.ids)}
        return {"document": name, "number": part.document, **values, "ids": ids, "text": text}

    def _show_document(self, name: str, index: int) -> None:
        last = self._run.last
        reads, prefixes = list[Part](), dict[str, None]()
        dataset, positions, entries = None, list[int](), list[dict[str, Any]]()
        for steps in self._run.steps(1, last):
            if steps.dataset is not dataset:
                dataset, named = steps.dataset, _named(steps.files, name)
                prefixes |= dict.fromkeys(named)
                if len(prefixes) > 1:
                    files = ", ".join(prefixes)
                    raise user_error("document-of-several-files", "document", files=files)
                positions = [one for file in named for one in _positions(steps, file, index)]
            for position in positions:
                step = steps.step_of(position)
                if step is not None:
                    document = next(iter(prefixes)), index
                    entries += self._reads(steps, step, position, document, reads)
        if not prefixes:
            raise user_error("document-of-no-file", "document", name=name, run=self._run.folder)
        self.found |= {"prefix": next(iter(prefixes)), "number": index, "reads": entries}
        self.show(f"{name}:{index}: {counted(len(entries), 'part')} in steps 1 to {last}")
        for entry in entries:
            end = entry["first"] + entry["tokens"] - 1
            self.show(
                f"step {entry['step']}, sample {entry['position']}, "
                f"data-parallel rank {entry['dp_rank']}, epoch {entry['epoch']}: "
                f"tokens {entry['first']} to {end}"
            )

    def _reads(
        self, steps: Steps, step: int, position: int, name: tuple[str, int], reads: list[Part]
    ) -> Iterator[dict[str, Any]]:
        """The parts of a document in a sample, of which `reads` are the earlier ones."""
        for part in parts_of(steps, position):
            if (part.prefix, part.document) == name:
                yield {
                    "step": step,
                    "position": position,
                    "dp_rank": steps.dp_rank(position),
                    "epoch": 1 + sum(part.role in earlier for earlier in reads),
                    "first": part.first,
                    "tokens": len(part.ids),
                }
                reads.append(part)


def _named(files: DataFiles, name: str) -> list[str]:
    """The token files of the training data whose path ends with a name."""
    groups = [group.sources for group in files.groups if group.split == "train"]
    prefixes = dict.fromkeys(source.prefix for sources in groups for source in sources)
    return [prefix for prefix in prefixes if f"/{prefix}".endswith(f"/{name}")]


def _positions(steps: Steps, prefix: str, document: int) -> list[int]:
    """Positions of the samples that have tokens of a document."""
    index = steps.files.open(prefix).document_index
    if document >= (size := len(index) - 1):
        texts = {"prefix": prefix, "document": document, "last": size - 1}
        raise user_error("document-beyond-file", "document", **texts)
    sequences = np.arange(index[document], index[document + 1])
    return [int(one) for one in steps.dataset.positions_of(prefix, sequences)]


main = cli.program(Options, lambda options: UsageInspection(options).run())

if __name__ == "__main__":
    start_tool.run(main)
