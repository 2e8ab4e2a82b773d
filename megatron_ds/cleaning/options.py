"""What a cleaning is asked to do, what is wrong with that, and the stages that come of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from megatron_ds.cleaning.decontamination import HANDLINGS, Decontaminate, TaskOptions
from megatron_ds.cleaning.deduplication import (
    UNITS,
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
from megatron_ds.config import TokenizerConfig, field_problems
from megatron_ds.fileio.resumable import COMPRESSIONS
from megatron_ds.preprocess.inputs import QUARANTINE, STDIN, InputSpec
from megatron_ds.tokenizer import build_tokenizer

STAGES = ("url", "fix", "length", "language", "exact", "near", "decontaminate")
"""In the order in which they run if none is asked for: what is cheap comes first, and what drops
least words last."""
LIBRARIES = {"fix": "ftfy", "language": "py3langid", "near": "rensa"}
"""What stages need of the extra `cleaning`."""
FIGURE = ".png"
NUMBERS = ".json"


@dataclass(frozen=True)
class CleaningOptions:
    """What to read, what to write and what to do in between.

    stages: names, in their order; None takes those of STAGES that have what they need. key: of the
    text; `a.b` is the field b of a. url_key: of the address. dropped: a file for what was dropped.
    report: a picture, beside which the numbers are written, or these alone. part_bytes: of input
    after which a killed run need not begin again. workers: processes that work.
    """

    inputs: InputSpec
    output: str
    stages: tuple[str, ...] | None = None
    key: str = "text"
    url_key: str = "url"
    dropped: str | None = None
    report: str | None = None
    resume: bool = False
    languages: tuple[str, ...] = ("en",)
    min_language_score: float = 0.5
    min_chars: int = 512
    min_words: int = 0
    min_tokens: int = 0
    tokenizer: TokenizerConfig | None = None
    tokenizer_vocab_size: int | None = None
    url_lists: tuple[str, ...] = ()
    near: NearOptions = field(default_factory=NearOptions)
    tasks: TaskOptions = field(default_factory=TaskOptions)
    workers: int = 1
    part_bytes: int = 1 << 24

    @property
    def order(self) -> tuple[str, ...]:
        """The stages that run."""
        if self.stages is not None:
            return self.stages
        lacking = {"url": not self.url_lists, "decontaminate": not self.tasks.files}
        return tuple(name for name in STAGES if not lacking.get(name))

    @property
    def quarantine(self) -> str:
        """The file of what gave no document."""
        return self.output + QUARANTINE

    @property
    def report_numbers(self) -> str | None:
        """The file of the report's numbers."""
        return None if self.report is None else os.path.splitext(self.report)[0] + NUMBERS

    @property
    def report_picture(self) -> str | None:
        """The file of the report's picture."""
        return self.report if self.report and self.report.lower().endswith(FIGURE) else None

    def problems(self) -> Iterator[str]:
        """What is wrong before anything is read, but for what the stages' own files hold."""
        yield from self.inputs.problems()
        yield from self._output_problems()
        for name in self.order:
            if name not in STAGES:
                yield f"--stages {name}: there is no such stage; there are {', '.join(STAGES)}"
        if len(set(self.order)) != len(self.order):
            yield f"--stages {' '.join(self.order)}: a stage is named twice"
        if self.workers < 1:
            yield f"--workers {self.workers}: must be at least 1"
        if self.resume:
            for path in self.inputs.unseekable_paths():
                yield f"--resume: --input {path} cannot be read a second time"
        yield from self._stage_problems()

    def _output_problems(self) -> Iterator[str]:
        named = [
            ("--output", self.output),
            ("--dropped", self.dropped),
            ("--report", self.report),
            ("the list of what gives no document,", self.quarantine),
        ]
        if self.report_picture is not None:
            named.append(("the numbers of --report,", self.report_numbers))
        tasks = InputSpec(paths=self.tasks.files)
        read = {os.path.realpath(path): "--url-blacklist" for path in self.url_lists}
        read |= {os.path.realpath(path): "--task-files" for path in tasks.local_files()}
        read |= {os.path.realpath(path): "--input" for path in self.inputs.local_files()}
        folders = [path for path in self.inputs.paths if os.path.isdir(path)]
        taken: dict[str, str] = {}
        for flag, path in named:
            if path is None:
                continue
            folder = os.path.dirname(path) or "."
            real = os.path.realpath(path)
            if os.path.isdir(path):
                yield f"{flag} {path}: is a folder"
            elif flag.startswith("--"):  # the others are beside one of these
                if not os.path.isdir(folder):
                    yield f"{flag} {path}: there is no folder {folder}"
                elif not os.access(folder, os.W_OK | os.X_OK):
                    yield f"{flag} {path}: the folder {folder} cannot be written"
                for inner in folders:
                    if _is_below(real, inner):
                        yield (
                            f"{flag} {path}: is in the folder {inner}, all files of which are "
                            "read: name a file in another folder"
                        )
            if real in read:
                yield f"{flag} {path}: is a file of {read[real]}, too"
            if real in taken:
                yield f"{flag} {path}: is {taken[real]}, too"
            taken[real] = flag
        for flag, path in named[:2]:
            suffix = os.path.splitext(path or "")[1].lower()
            if suffix in (".zst", ".parquet", ".arrow", ".csv", ".tsv"):
                known = " ".join(f".jsonl{suffix}" for suffix in ("", *COMPRESSIONS))
                yield f"{flag} {path}: JSON lines are written, with a name that ends so: {known}"
        if self.report is not None:
            if not self.report.lower().endswith((FIGURE, NUMBERS)):
                yield f"--report {self.report}: must end with {FIGURE} or {NUMBERS}"
            elif self.report_picture is not None:
                try:
                    version("matplotlib")
                except PackageNotFoundError:
                    yield (
                        f"--report {self.report}: a picture needs matplotlib: "
                        f"pip install 'megatron_ds[plot]'; a name that ends with {NUMBERS} does not"
                    )

    def _stage_problems(self) -> Iterator[str]:
        given = {
            "url": ("--url-blacklist", bool(self.url_lists)),
            "decontaminate": ("--task-files", bool(self.tasks.files)),
            "length": ("--min-tokens", self.min_tokens > 0),
        }
        for stage, (flag, is_given) in given.items():
            if is_given and stage not in self.order:
                yield f"{flag}: is for the stage {stage}, which --stages does not name"
        if "decontaminate" in self.order and not self.tasks.files:
            yield "--stages decontaminate: needs --task-files"
        if not self.languages:
            yield "--languages: at least one code is needed"
        if (self.min_tokens > 0) != (self.tokenizer is not None):
            yield "--min-tokens and --tokenizer-type go together: one counts with the other"
        elif self.tokenizer is not None:
            yield from field_problems(self.tokenizer)
            yield from self.tokenizer.problems(self.tokenizer_vocab_size)
        for flag, share in (
            ("--min-language-score", self.min_language_score),
            ("--near-duplicate-threshold", self.near.threshold),
        ):
            if not 0 <= share <= 1 or (share == 0 and "near" in flag):
                yield f"{flag} {share}: must be above 0, and 1 at most"
        for flag, number, least, most in (
            ("--min-chars", self.min_chars, 0, None),
            ("--min-words", self.min_words, 0, None),
            ("--min-tokens", self.min_tokens, 0, None),
            ("--num-perm", self.near.num_perm, 16, 4096),
            ("--near-ngram-size", self.near.ngram, 1, None),
            ("--seed", self.near.seed, 0, (1 << 64) - 1),
            ("--min-ngram-size", self.tasks.min_ngram, 2, None),
            ("--ngram-size", self.tasks.ngram, 2, None),
            ("--cut-margin", self.tasks.margin, 0, None),
            ("--min-piece-chars", self.tasks.min_piece, 0, None),
            ("--max-pieces", self.tasks.max_pieces, 1, None),
        ):
            if number < least or (most is not None and number > most):
                bound = f"at least {least}" if most is None else f"{least} to {most}"
                yield f"{flag} {number}: must be {bound}"
        if self.tasks.min_ngram > self.tasks.ngram:
            yield (
                f"--min-ngram-size {self.tasks.min_ngram}: must not be above --ngram-size "
                f"{self.tasks.ngram}"
            )
        if self.near.unit not in UNITS:
            yield f"--near-ngram-unit {self.near.unit}: must be one of {', '.join(UNITS)}"
        if self.tasks.handling not in HANDLINGS:
            yield f"--contaminated {self.tasks.handling}: must be one of {', '.join(HANDLINGS)}"
        for problem in InputSpec(paths=self.tasks.files or (STDIN,)).problems():
            yield problem.replace("--paths", "--task-files")
        if STDIN in self.tasks.files:
            yield "--task-files -: the standard input is no file of tasks"

    def build(self) -> list[Stage]:
        """The stages. Raises ValueError with everything that is wrong, here and in their files."""
        problems = list(self.problems())
        stages: list[Stage] = []
        sound = not problems
        for name in self.order:
            if sound or name in LIBRARIES:  # the others read files, which are known to be there
                try:
                    stages.append(self._makers()[name]())
                except ValueError as error:
                    problems.append(str(error))
        for stage in stages:
            if isinstance(stage, LanguageFilter):
                problems += stage.problems()
        if problems:
            raise ValueError("\n".join(problems))
        return stages

    def _makers(self) -> dict[str, Callable[[], Stage]]:
        return {
            "fix": FixUnicode,
            "language": lambda: LanguageFilter(self.languages, self.min_language_score),
            "length": self._length,
            "url": lambda: UrlFilter(self.url_lists),
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
        """By stage, for those whose outcome depends on earlier documents."""
        made: dict[str, SeenKeys] = {}
        if "exact" in self.order:
            made["exact"] = SeenHashes()
        if "near" in self.order:
            made["near"] = LshIndex(self.near)
        return made

    def resume_key(self, stages: list[Stage]) -> dict[str, Any]:
        """All that decides the output, by flag: an interrupted run goes on only if it is the same.

        stages: those that `build` made. Files are named with what they hold.
        """
        inputs = self.inputs
        chosen: dict[str, Any] = {
            "--input": [*inputs.paths],
            "--input-format": inputs.format,
            "--text-documents": inputs.text_documents,
            "--hf-dataset": inputs.hf_dataset,
            "--hf-config": inputs.hf_config,
            "--split": inputs.hf_split,
            "--max-document-bytes": inputs.max_document_bytes,
            "--output": os.path.basename(self.output),
            "--dropped": self.dropped,
            "--stages": [*self.order],
            "--json-key": self.key,
            "part": self.part_bytes,
        }
        chosen |= file_stamps(inputs)
        for stage in stages:
            chosen |= self._settings_of(stage)
        for name in self.order:
            if name in LIBRARIES:
                chosen[f"version of {LIBRARIES[name]}"] = version(LIBRARIES[name])
        return chosen

    def _settings_of(self, stage: Stage) -> dict[str, Any]:
        near, tasks = self.near, self.tasks
        if isinstance(stage, LanguageFilter):
            return {
                "--languages": sorted(self.languages),
                "--min-language-score": self.min_language_score,
            }
        if isinstance(stage, LengthFilter):
            used = stage.tokenizer
            return {
                "--min-chars": self.min_chars,
                "--min-words": self.min_words,
                "--min-tokens": self.min_tokens,
                "tokenizer": None if used is None else used.fingerprint.digest,
            }
        if isinstance(stage, UrlFilter):
            return {"--url-key": self.url_key, "--url-blacklist": file_hashes(self.url_lists)}
        if isinstance(stage, MinHashSignature):
            return {
                "--near-duplicate-threshold": near.threshold,
                "--num-perm": near.num_perm,
                "--near-ngram-size": near.ngram,
                "--near-ngram-unit": near.unit,
                "--seed": near.seed,
            }
        if isinstance(stage, Decontaminate):
            return {
                "--task-files": stage.fingerprint,
                "--ngram-size": tasks.ngram,
                "--min-ngram-size": tasks.min_ngram,
                "--contaminated": tasks.handling,
                "--cut-margin": tasks.margin,
                "--min-piece-chars": tasks.min_piece,
                "--max-pieces": tasks.max_pieces,
            }
        return {}


def _is_below(real: str, folder: str) -> bool:
    return real.startswith(os.path.join(os.path.realpath(folder), ""))


def file_stamps(inputs: InputSpec) -> dict[str, str]:
    """Name and version of each input file: settings of a run."""
    return inputs.describe_files()


def file_hashes(paths: Sequence[str]) -> list[str]:
    """Each file with the beginning of what it hashes to."""
    named: list[str] = []
    for path in paths:
        with open(path, "rb") as file:
            named.append(f"{path} ({sha256(file.read()).hexdigest()[:12]})")
    return named
