"""Options of cleaning, their problems, and the stages that they define."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.metadata import version
from typing import Any

from megatron_ds.cleaning.decontamination import Decontaminate, TaskOptions
from megatron_ds.cleaning.deduplication import (
    ExactHash,
    LshIndex,
    MinHashSignature,
    NearOptions,
    SeenHashes,
)
from megatron_ds.cleaning.fix_unicode import FixUnicode
from megatron_ds.cleaning.language_filter import LanguageFilter
from megatron_ds.cleaning.length_filter import LengthFilter
from megatron_ds.cleaning.stages import SeenKeys, Stage
from megatron_ds.cleaning.url_filter import UrlFilter
from megatron_ds.config import TokenizerConfig
from megatron_ds.config.fields import field_problems, option_field, option_group
from megatron_ds.config.problems import Problem, UserError, option
from megatron_ds.fileio.resumable import COMPRESSORS
from megatron_ds.preprocess.inputs import QUARANTINE, InputSpec
from megatron_ds.tokenizer import build_tokenizer

STAGES = ("url", "fix", "length", "language", "exact", "near", "decontaminate")
"""In their default order: cheap stages first, stages that drop few words last."""
NO_STAGES = "none"
LIBRARIES = {"fix": "ftfy", "language": "py3langid", "near": "rensa"}
"""Packages of the extra `cleaning` that stages need."""
FIGURE = ".png"
NUMBERS = ".json"


@dataclass(frozen=True)
class CleaningOptions:
    """Input, output and stages."""

    inputs: InputSpec = option_group(InputSpec())
    output: str = option_field(
        "",
        "output file: JSON lines with all fields of the documents, in input order; "
        "compressed if the name ends with .gz, .xz or .bz2",
        metavar="FILE",
        required=True,
    )
    stages: tuple[str, ...] | None = option_field(
        None,
        f"stages in this order: {' '.join(STAGES)}, or {NO_STAGES} (default: all, url and "
        "decontaminate if they have files)",
        nargs="*",
        metavar="STAGE",
    )
    json_key: str = option_field(
        "text", "key or column of the text; a.b is key b nested in a", metavar="KEY"
    )
    url_key: str = option_field(
        "url",
        "stage url: key or column of the URL; documents without a URL are kept",
        metavar="KEY",
    )
    dropped_output: str | None = option_field(
        None, "output file for dropped documents, with stage and reason", metavar="FILE"
    )
    report: str | None = option_field(
        None,
        "output file for a figure of the results (.png, with its numbers in a .json next "
        "to it), or for the numbers only (.json)",
        metavar="FILE",
    )
    resume: bool = option_field(
        False, "continue an interrupted run; the output equals that of an uninterrupted run"
    )
    url_blacklist: tuple[str, ...] = option_field(
        (),
        "stage url: files with one entry per line: a host (example.com), a name (reddit), "
        "a file suffix (.pdf) or regex:PATTERN",
        nargs="*",
        metavar="FILE",
    )
    min_chars: int = option_field(512, "stage length: minimum characters", minimum=0)
    min_words: int = option_field(0, "stage length: minimum words", minimum=0)
    min_tokens: int = option_field(0, "stage length: minimum tokens of --tokenizer-type", minimum=0)
    languages: tuple[str, ...] = option_field(
        ("en",), "stage language: ISO 639 codes of the languages to keep", nargs="*", metavar="CODE"
    )
    min_language_score: float = option_field(
        0.5, "stage language: minimum probability of the language", minimum=0, maximum=1
    )
    workers: int = option_field(1, "number of worker processes (default: one per core)", minimum=1)
    near: NearOptions = option_group(NearOptions())
    tasks: TaskOptions = option_group(TaskOptions())
    tokenizer: TokenizerConfig | None = None
    tokenizer_vocab_size: int | None = None
    part_bytes: int = 1 << 24
    """Bytes of input between commits."""

    @property
    def order(self) -> tuple[str, ...]:
        """The stages that run."""
        if self.stages is not None:
            names = tuple(name for word in self.stages for name in word.split(",") if name)
            return () if names == (NO_STAGES,) else names
        missing = {"url": not self.url_blacklist, "decontaminate": not self.tasks.eval_task_files}
        return tuple(name for name in STAGES if not missing.get(name))

    @property
    def quarantine(self) -> str:
        """The list of rejected documents."""
        return self.output + QUARANTINE

    @property
    def report_numbers(self) -> str | None:
        """The file of the report's numbers."""
        return None if self.report is None else os.path.splitext(self.report)[0] + NUMBERS

    @property
    def report_figure(self) -> str | None:
        """The file of the report's figure."""
        return self.report if self.report and self.report.lower().endswith(FIGURE) else None

    def problems(self) -> Iterator[Problem]:
        """Problems that can be found without reading the documents or the stages' files."""
        for group in (self, self.near, self.tasks):
            yield from field_problems(group)
        yield from self.inputs.problems()
        yield from self._output_problems()
        yield from self._report_problems()
        yield from self._stage_problems()
        yield from self.tasks.problems()
        if self.resume:
            yield from self.inputs.resume_problems()

    def _output_problems(self) -> Iterator[Problem]:
        if not self.output:
            return
        given = {
            name: path
            for name in ("output", "dropped_output", "report")
            if (path := getattr(self, name)) is not None
        }
        files = {option(name): path for name, path in given.items()}
        files["the list of rejected documents"] = self.quarantine
        if self.report_figure is not None:
            files[f"the numbers of {option('report')}"] = str(self.report_numbers)
        for name, path in given.items():
            yield from self._folder_problems(name, path)
            suffix = os.path.splitext(path)[1].lower()
            if name != "report" and suffix in (".zst", ".parquet", ".arrow", ".csv", ".tsv"):
                known = " ".join(f".jsonl{suffix}" for suffix in ("", *COMPRESSORS))
                text = f"{option(name)} {path}: the output is JSON lines; use a suffix of {known}"
                yield Problem("cleaning-output-suffix", name, text=text)
        readers = self._files_read()
        written: dict[str, str] = {}
        for role, path in files.items():
            real = os.path.realpath(path)
            if real in readers:
                text = f"{role} {path}: is also a file of {option(readers[real])}"
                yield Problem("cleaning-output-is-input", readers[real], text=text)
            if real in written:
                text = f"{role} {path}: is also {written[real]}"
                yield Problem("cleaning-outputs-collide", text=text)
            written[real] = role

    def _files_read(self) -> dict[str, str]:
        """By real path, the field that names a file that is read."""
        tasks = InputSpec(paths=self.tasks.eval_task_files)
        named = {
            "url_blacklist": self.url_blacklist,
            "eval_task_files": tasks.local_files(),
            "paths": self.inputs.local_files(),
        }
        return {os.path.realpath(path): name for name, paths in named.items() for path in paths}

    def _folder_problems(self, name: str, path: str) -> Iterator[Problem]:
        folder = os.path.dirname(path) or "."
        reason = ""
        if os.path.isdir(path):
            reason = "is a folder"
        elif not os.path.isdir(folder):
            reason = f"there is no folder {folder}"
        elif not os.access(folder, os.W_OK | os.X_OK):
            reason = f"the folder {folder} is not writable"
        if reason:
            yield Problem(
                "cleaning-output-unusable", name, flag=option(name), path=path, reason=reason
            )
            return
        for inner in filter(os.path.isdir, self.inputs.paths):
            if os.path.realpath(path).startswith(os.path.join(os.path.realpath(inner), "")):
                text = (
                    f"{option(name)} {path}: is in the input folder {inner}: choose another folder"
                )
                yield Problem("cleaning-output-in-input", name, "paths", text=text)

    def _report_problems(self) -> Iterator[Problem]:
        if self.report is None:
            return
        if not self.report.lower().endswith((FIGURE, NUMBERS)):
            text = f"{option('report')} {self.report}: must end with {FIGURE} or {NUMBERS}"
            yield Problem("report-suffix", text=text)
        elif self.report_figure and importlib.util.find_spec("matplotlib") is None:
            text = (
                f"{option('report')} {self.report}: a figure requires matplotlib: "
                f"pip install 'megatron_ds[plot]'; or use a name that ends with {NUMBERS}"
            )
            yield Problem("report-needs-matplotlib", text=text)

    def _stage_problems(self) -> Iterator[Problem]:
        for name in self.order:
            if name not in STAGES:
                known = ", ".join(STAGES)
                text = f"{option('stages')} {name}: unknown stage; valid: {known}"
                yield Problem("unknown-stage", text=text)
        if len(set(self.order)) != len(self.order):
            text = f"{option('stages')} {' '.join(self.order)}: a stage is repeated"
            yield Problem("repeated-stage", text=text)
        for stage, field, is_given in (
            ("url", "url_blacklist", bool(self.url_blacklist)),
            ("decontaminate", "eval_task_files", bool(self.tasks.eval_task_files)),
            ("length", "min_tokens", self.min_tokens > 0),
        ):
            if is_given and stage not in self.order:
                text = f"{option(field)} is for the stage {stage}, which does not run"
                yield Problem("option-of-unused-stage", field, "stages", text=text)
        if "decontaminate" in self.order and not self.tasks.eval_task_files:
            text = f"{option('stages')} decontaminate requires {option('eval_task_files')}"
            yield Problem("decontamination-without-tasks", text=text)
        if not self.languages:
            yield Problem("required", "languages")
        if (self.min_tokens > 0) != (self.tokenizer is not None):
            text = f"{option('min_tokens')} and {option('tokenizer_type')} require each other"
            yield Problem("min-tokens-and-tokenizer", text=text)
        elif self.tokenizer is not None:
            yield from field_problems(self.tokenizer)
            yield from self.tokenizer.problems(self.tokenizer_vocab_size)

    def build(self) -> list[Stage]:
        """The stages.

        Raises:
            UserError: With all problems of the options and of the stages' files.
        """
        problems = list(self.problems())
        stages: list[Stage] = []
        is_valid = not problems
        for name in self.order:
            if is_valid or name in LIBRARIES:  # the other ones read files, which must exist
                try:
                    stages.append(self._builders()[name]())
                except UserError as error:
                    problems += error.problems
                except ValueError as error:
                    problems.append(Problem("stage-unusable", error=str(error)))
        for stage in stages:
            if isinstance(stage, LanguageFilter):
                problems += stage.problems()
        if problems:
            raise UserError(*problems)
        return stages

    def _builders(self) -> dict[str, Callable[[], Stage]]:
        return {
            "fix": FixUnicode,
            "language": lambda: LanguageFilter(self.languages, self.min_language_score),
            "length": self._length,
            "url": lambda: UrlFilter(self.url_blacklist),
            "exact": ExactHash,
            "near": lambda: MinHashSignature(self.near),
            "decontaminate": lambda: Decontaminate(self.tasks),
        }

    def _length(self) -> Stage:
        tokenizer = None
        if self.tokenizer is not None:
            tokenizer = build_tokenizer(self.tokenizer, self.tokenizer_vocab_size)
        return LengthFilter(self.min_chars, self.min_words, self.min_tokens, tokenizer)

    def build_seen_keys(self) -> dict[str, SeenKeys]:
        """By stage, for stages whose outcome depends on earlier documents."""
        seen: dict[str, SeenKeys] = {}
        if "exact" in self.order:
            seen["exact"] = SeenHashes()
        if "near" in self.order:
            seen["near"] = LshIndex(self.near)
        return seen

    def resume_settings(self, stages: list[Stage]) -> dict[str, Any]:
        """All that determines the output, which a resumed run must share.

        Args:
            stages: The result of `build`.
        """
        settings: dict[str, Any] = {
            **vars(self.inputs),
            "paths": [*self.inputs.paths],
            "output": os.path.basename(self.output),
            "dropped_output": self.dropped_output,
            "stages": [*self.order],
            "json_key": self.json_key,
            "bytes between commits": self.part_bytes,
            **self.inputs.describe_files(),
        }
        for stage in stages:
            settings |= self._settings_of(stage)
        for name in self.order:
            if name in LIBRARIES:
                settings[f"version of {LIBRARIES[name]}"] = version(LIBRARIES[name])
        return settings

    def _settings_of(self, stage: Stage) -> dict[str, Any]:
        if isinstance(stage, LanguageFilter):
            return {
                "languages": sorted(self.languages),
                "min_language_score": self.min_language_score,
            }
        if isinstance(stage, LengthFilter):
            names = ("min_chars", "min_words", "min_tokens")
            tokenizer = stage.tokenizer
            fingerprint = None if tokenizer is None else tokenizer.fingerprint.digest
            return {**{name: getattr(self, name) for name in names}, "tokenizer": fingerprint}
        if isinstance(stage, UrlFilter):
            return {"url_key": self.url_key, "url_blacklist": file_hashes(self.url_blacklist)}
        if isinstance(stage, MinHashSignature):
            return dict(vars(self.near))
        if isinstance(stage, Decontaminate):
            return {**vars(self.tasks), "eval_task_files": stage.fingerprint}
        return {}


def file_hashes(paths: Sequence[str]) -> list[str]:
    """Each file with the start of the hash of its content."""
    hashes: list[str] = []
    for path in paths:
        with open(path, "rb") as file:
            hashes.append(f"{path} ({sha256(file.read()).hexdigest()[:12]})")
    return hashes
