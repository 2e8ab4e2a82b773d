"""Options that select the documents to read, the same for every tool that reads documents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ds.config.fields import option_field
from megatron_ds.preprocess.inputs import FORMATS, TEXT_DOCUMENTS, InputSpec


@dataclass(frozen=True)
class InputOptions(InputSpec):
    """Documents to read."""

    paths: tuple[str, ...] = option_field(
        (),
        "files, patterns, folders, addresses (s3://, hf://, ...) or - for the standard input: JSON "
        "lines, parquet, arrow, csv, tsv or plain text, by name; .gz .xz .zst .bz2 as well",
        flag="input",
        nargs="*",
        metavar="PATH",
    )
    format: str = option_field(
        "auto",
        "format of all files (auto: by the name of each, else jsonl)",
        flag="input-format",
        choices=("auto", *FORMATS),
    )
    text_documents: str = option_field(
        "file",
        "document of a plain text: the entire file, or a paragraph between blank lines",
        flag="text-document-unit",
        choices=TEXT_DOCUMENTS,
    )
    hf_dataset: str | None = option_field(
        None, "Hugging Face data set: name, path or saved folder", metavar="NAME"
    )
    hf_config: str | None = option_field(None, "configuration of --hf-dataset", metavar="NAME")
    hf_split: str = option_field("train", "split of --hf-dataset", metavar="NAME")
    max_document_bytes: int = option_field(
        1 << 27, "longer documents are rejected", minimum=1, below=1 << 31
    )


class Flags(Protocol):
    """A tool's parser, or a group of its flags."""

    def add_argument(self, *names: str, **rest: Any) -> object: ...


def add_input_flags(flags: Flags) -> None:
    """Adds them all but those of the keys, of which each tool takes its own number."""
    flags.add_argument(
        "--input",
        nargs="+",
        default=[],
        metavar="PATH",
        help="files, patterns, folders, addresses (s3://, hf://, ...) or - for the standard input: "
        "JSON lines, parquet, arrow, csv, tsv or plain text, by name; .gz .xz .zst .bz2 as well",
    )
    flags.add_argument(
        "--input-format",
        choices=["auto", *FORMATS],
        default=InputSpec.format,
        help="what the files are, whatever their names say (default: by name, else jsonl)",
    )
    flags.add_argument(
        "--text-documents",
        choices=TEXT_DOCUMENTS,
        default=InputSpec.text_documents,
        help="a document of plain text is a whole file, or a block between blank lines "
        "(default: %(default)s)",
    )
    flags.add_argument(
        "--hf-dataset", metavar="NAME", help="a Hugging Face data set: name, path or saved folder"
    )
    flags.add_argument("--hf-config", metavar="NAME", help="configuration of --hf-dataset")
    flags.add_argument(
        "--split",
        default=InputSpec.hf_split,
        metavar="NAME",
        help="split of --hf-dataset (default: %(default)s)",
    )
    flags.add_argument(
        "--max-document-bytes",
        type=int,
        default=InputSpec.max_document_bytes,
        metavar="N",
        help="longer documents are left out (default: %(default)s)",
    )


def inputs_of(args: Any) -> InputSpec:
    """What the flags say."""
    return InputSpec(
        paths=tuple(args.input),
        format=args.input_format,
        text_documents=args.text_documents,
        hf_dataset=args.hf_dataset,
        hf_config=args.hf_config,
        hf_split=args.split,
        max_document_bytes=args.max_document_bytes,
    )
