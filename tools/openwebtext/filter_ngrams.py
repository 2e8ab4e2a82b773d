"""Remove texts of evaluation tasks from documents, with the flags of Megatron's filter_ngrams.py.

The stage decontaminate of clean.py, whose other flags may follow. Tasks are read from files,
not downloaded.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from megatron_ds import cli
from megatron_ds.cleaning.command import CleaningCommand, work
from megatron_ds.cleaning.options import CleaningOptions
from megatron_ds.config.fields import option_field, option_group
from megatron_ds.config.problems import Problem

LAMBADA = "lambada"


@dataclass(frozen=True)
class Options(CleaningCommand):
    """Removes texts of evaluation tasks from documents: the stage decontaminate of clean.py.

    Tasks are read from files, not downloaded.
    """

    FIELD_FLAGS: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("paths", "json_key", "json_keys"), "--dedup-dataset"
    )

    dedup_dataset: tuple[str, ...] = option_field((), nargs=2, metavar="TEXT", required=True)
    """File of documents, followed by the key of the text."""
    tasks: tuple[str, ...] = option_field((), help=f"only {LAMBADA}", nargs="*", metavar="TASK")
    lambada_path: str | None = option_field(None, metavar="FILE")
    """Same as --eval-task-files."""
    cleaning: CleaningOptions = option_group(
        dataclasses.replace(CleaningCommand.cleaning, stages=("decontaminate",)),
        flags={
            **dict.fromkeys(("paths", "json_key", "hf_dataset", "hf_config", "hf_split")),
            "ngram_size": ("max-ngram-size", "ngram-size"),
            "min_fragment_chars": ("filter-text-char-len", "min-fragment-chars"),
            "max_fragments": ("splits-count", "max-fragments"),
            "contamination_margin_chars": ("remove-char-each-side", "contamination-margin-chars"),
            "workers": ("num-threads", "workers"),
        },
    )

    @property
    def options(self) -> CleaningOptions:
        options = super().options
        path, key = self.dedup_dataset
        files = (*options.tasks.eval_task_files, *filter(None, [self.lambada_path]))
        return dataclasses.replace(
            options,
            inputs=dataclasses.replace(options.inputs, paths=(path,)),
            json_key=key,
            tasks=dataclasses.replace(options.tasks, eval_task_files=files),
        )

    def problems(self) -> Iterator[Problem]:
        for task in self.tasks:
            if task != LAMBADA:
                yield Problem("task-not-fetched", task=task)
        if LAMBADA in self.tasks and self.lambada_path is None:
            yield Problem("lambada-without-file")
        elif not self.cleaning.tasks.eval_task_files and self.lambada_path is None:
            yield Problem("required", "eval_task_files")


main = cli.program(Options, work)

if __name__ == "__main__":
    start_tool.run(main)
