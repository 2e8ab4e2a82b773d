"""Options of cleaning, their problems, and the stages that they define."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_ds.cleaning.decontamination import Decontaminate, TaskOptions
from megatron_ds.cleaning.deduplication import (
    ExactHash,
    LshIndex,
    MinHashSignature,
    NearOptions,
    SeenHashes,
)
from megatron_ds.cleaning.stages import SeenKeys, Stage
from megatron_ds.cleaning.text_filters import FixUnicode, LanguageFilter, LengthFilter
from megatron_ds.cleaning.url_filter import UrlFilter
from megatron_ds.config import TokenizerConfig
from megatron_ds.config.checks import folder_problems, replaced_file_problems
from megatron_ds.config.fields import field_problems, no_effect_problem, option_field, option_group
from megatron_ds.config.problems import Problem, collect, option, raise_if_any
from megatron_ds.fileio.resumable import COMPRESSORS
from megatron_ds.preprocess.documents.inputs import QUARANTINE, InputSpec
from megatron_ds.tokenizer import build_tokenizer

STAGES = ("url", "fix", "length", "language", "exact", "near", "decontaminate")
"""Stages in their default order: cheap ones first, and last the ones that drop few words."""
NO_STAGES = "none"
NEED_PACKAGES = ("fix", "language", "near")
"""Stages that need packages of the extra `cleaning`."""
RESUME = "continue an interrupted run; the output equals that of an uninterrupted run"
"""Help of the option."""


@dataclass(frozen=True)
class CleaningOptions:
    """Input, output and stages."""

    inputs: InputSpec = option_group(InputSpec())
    output: str = option_field("", metavar="FILE", required=True)
    """Output file: JSON lines with all fields of the documents, in input order; compressed if the
    name ends with .gz, .xz or .bz2."""
    stages: tuple[str, ...] | None = option_field(
        None,
        help=f"stages in this order: {' '.join(STAGES)}, or {NO_STAGES} (default: all, url and "
        "decontaminate if they have files)",
        nargs="*",
        metavar="STAGE",
    )
    json_key: str = option_field("text", metavar="KEY")
    """Key or column of the text; a.b is key b nested in a."""
    url_key: str = option_field("url", metavar="KEY")
    """Stage url: key or column of the URL; documents without a URL are kept."""
    dropped_output: str | None = option_field(None, metavar="FILE")
    """Output file for dropped documents, with stage and reason."""
    report: str | None = option_field(None, metavar="FILE")
    """Output file for the numbers of documents by stage and reason (.json)."""
    resume: bool = option_field(False, help=RESUME)
    url_blacklist: tuple[str, ...] = option_field((), nargs="*", metavar="FILE")
    """Stage url: files with one entry per line: a host (example.com), a name (reddit), a file
    suffix (.pdf) or regex:PATTERN."""
    min_chars: int = option_field(512, minimum=0)
    """Stage length: minimum characters."""
    min_words: int = option_field(0, minimum=0)
    """Stage length: minimum words."""
    min_tokens: int = option_field(0, minimum=0)
    """Stage length: minimum tokens of --tokenizer-type."""
    languages: tuple[str, ...] = option_field(("en",), nargs="*", metavar="CODE")
    """Stage language: ISO 639 codes of the languages to keep."""
    min_language_score: float = option_field(0.5, minimum=0, maximum=1)
    """Stage language: minimum probability of the language."""
    workers: int = option_field(1, minimum=1)
    """Number of worker processes (default: one per core)."""
    near: NearOptions = option_group(NearOptions())
    tasks: TaskOptions = option_group(TaskOptions())
    tokenizer: TokenizerConfig | None = None
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

    def problems(self) -> Iterator[Problem]:
        """Problems that can be found without reading the documents or the stages' files."""
        for group in (self, self.near, self.tasks):
            yield from field_problems(group)
        yield from self.inputs.problems()
        yield from self._output_problems()
        if self.report is not None and not self.report.lower().endswith(".json"):
            yield Problem("report-suffix", settings=self)
        yield from self._stage_problems()
        if self.resume:
            yield from self.inputs.resume_problems()

    def _output_problems(self) -> Iterator[Problem]:
        if not self.output:
            return
        paths = {name: getattr(self, name) for name in ("output", "dropped_output", "report")}
        paths = {name: path for name, path in paths.items() if path is not None}
        files = {option(name): path for name, path in paths.items()}
        files["the list of rejected documents"] = self.quarantine
        for name, path in paths.items():
            yield from self._folder_problems(name, path)
            suffix = os.path.splitext(path)[1].lower()
            if name != "report" and suffix in (".zst", ".parquet", ".arrow", ".csv", ".tsv"):
                known = " ".join(f".jsonl{suffix}" for suffix in ("", *COMPRESSORS))
                yield Problem("cleaning-output-suffix", name, path=path, known=known)
        tasks = InputSpec(paths=self.tasks.eval_task_files)
        named = {
            "url_blacklist": self.url_blacklist,
            "eval_task_files": tasks.local_files(),
            "paths": self.inputs.local_files(),
        }
        readers = {os.path.realpath(path): name for name, paths in named.items() for path in paths}
        written: dict[str, str] = {}
        for role, path in files.items():
            real = os.path.realpath(path)
            if real in readers:
                yield Problem("cleaning-output-is-input", readers[real], role=role, path=path)
            if real in written:
                yield Problem("cleaning-outputs-collide", role=role, path=path, other=written[real])
            written[real] = role

    def _folder_problems(self, name: str, path: str) -> Iterator[Problem]:
        problems = list(folder_problems(name, os.path.dirname(path) or "."))
        if problems := problems or list(replaced_file_problems(name, path)):
            yield from problems
            return
        for inner in filter(os.path.isdir, self.inputs.paths):
            if os.path.realpath(path).startswith(os.path.join(os.path.realpath(inner), "")):
                yield Problem("cleaning-output-in-input", name, "paths", path=path, folder=inner)

    def _stage_problems(self) -> Iterator[Problem]:
        for name in self.order:
            if name not in STAGES:
                yield Problem("unknown-stage", name=name, known=", ".join(STAGES))
        if len(set(self.order)) != len(self.order):
            yield Problem("repeated-stage", stages=" ".join(self.order))
        if "decontaminate" in self.order:
            yield from self.tasks.problems()
            if not self.tasks.eval_task_files:
                yield Problem("decontamination-without-tasks")
        if "language" in self.order and not self.languages:
            yield Problem("required", "languages")
        if self.min_tokens > 0 and "length" in self.order:
            if self.tokenizer is None:
                yield Problem("min-tokens-without-tokenizer")
            else:
                yield from field_problems(self.tokenizer)
                yield from self.tokenizer.problems(vocab_size=None)

    def warnings(self) -> Iterator[Problem]:
        """Warn of options of stages that do not run."""
        for stage, name, is_given in (
            ("url", "url_blacklist", bool(self.url_blacklist)),
            ("decontaminate", "eval_task_files", bool(self.tasks.eval_task_files)),
            ("length", "min_tokens", self.min_tokens > 0),
        ):
            if is_given and stage not in self.order:
                yield no_effect_problem(name, reason=f"without the stage {stage}")
        if self.tokenizer is not None and not self.min_tokens:
            yield no_effect_problem("tokenizer_type", reason=f"without {option('min_tokens')}")

    def build(self) -> list[Stage]:
        """The stages.

        Raises:
            UserError: With all problems of the options and of the stages' files.
        """
        builders: dict[str, Callable[[], Stage]] = {
            "url": partial(UrlFilter, self.url_blacklist),
            "fix": FixUnicode,
            "length": self._length,
            "language": partial(LanguageFilter, self.languages, self.min_language_score),
            "exact": ExactHash,
            "near": partial(MinHashSignature, self.near),
            "decontaminate": partial(Decontaminate, self.tasks),
        }
        problems = list(self.problems())
        is_valid = not problems
        stages: list[Stage] = []
        for name in self.order:
            if is_valid or name in NEED_PACKAGES:  # other stages read files, which must exist
                with collect(problems):
                    stages.append(builders[name]())
        raise_if_any(problems)
        return stages

    def _length(self) -> Stage:
        counted = self.tokenizer if self.min_tokens > 0 else None
        tokenizer = None if counted is None else build_tokenizer(counted)
        return LengthFilter(self.min_chars, self.min_words, self.min_tokens, tokenizer)

    def build_seen_keys(self) -> dict[str, SeenKeys]:
        """Builds the keys of earlier documents for the stages that depend on them, by stage."""
        builders: dict[str, Callable[[], SeenKeys]] = {
            "exact": SeenHashes,
            "near": partial(LshIndex, self.near),
        }
        return {name: builders[name]() for name in self.order if name in builders}

    def resume_settings(self, stages: list[Stage]) -> dict[str, Any]:
        """All that determines the output, which a resumed run must share.

        Args:
            stages: The result of `build`.
        """
        settings: dict[str, Any] = {
            **vars(self.inputs),
            "output": os.path.basename(self.output),
            "dropped_output": self.dropped_output,
            "stages": self.order,
            "json_key": self.json_key,
            "bytes between commits": self.part_bytes,
            **self.inputs.describe_files(),
        }
        if "url" in self.order:
            settings["url_key"] = self.url_key
        for stage in stages:
            settings |= stage.settings
        return settings
