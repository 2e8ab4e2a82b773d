"""The texts of an evaluation: documents of files in any input format, or of token files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_ds.config.problems import Problem, collect, renaming_fields, user_error
from megatron_ds.data.token_files.kinds import is_token_file, open_token_file
from megatron_ds.evaluation.tasks import Text
from megatron_ds.preprocess.documents.document_readers import DocumentReader
from megatron_ds.preprocess.documents.inputs import STDIN, InputSpec
from megatron_ds.preprocess.documents.parsing import RejectedDocument, TextFields, texts_of
from megatron_ds.tokenizer import Tokenizer

VALID_DATA = "valid_data"


def problems(
    paths: Sequence[str], keys: Sequence[str], format: str = "auto", field: str = VALID_DATA
) -> Iterator[Problem]:
    """Problems with the paths of a field, and with the first document of each; see `read_texts`."""
    files = tuple(path for path in paths if not is_token_file(path))
    invalid = [*InputSpec(files, format).problems()] if files else []
    for path in () if invalid else files:
        if path == STDIN or Path(path).is_fifo():
            continue  # can be read only once
        with collect(invalid):
            if next(_documents(InputSpec((path,), format), keys), None) is None:
                invalid.append(Problem("file-without-text", "paths", path=path))
    yield from (problem.about(paths=field) for problem in invalid)


def read_texts(
    paths: Sequence[str],
    keys: Sequence[str],
    tokenizer: Tokenizer,
    format: str = "auto",
    field: str = VALID_DATA,
) -> Iterator[Text]:
    """The texts, in order.

    Args:
        paths: Files, URLs, folders, or prefixes of token files.
        keys: Keys of the texts of a document.
        tokenizer: Tokenizer of token files.
        format: See `InputSpec`.
        field: Option field of the paths, for error messages.

    Raises:
        UserError: If a document has no text.
    """
    for path in paths:
        if is_token_file(path):
            yield from _token_texts(path, tokenizer)
            continue
        with renaming_fields(paths=field):
            yield from _documents(InputSpec((path,), format), keys)


def _documents(inputs: InputSpec, keys: Sequence[str]) -> Iterator[Text]:
    fields = TextFields(tuple(keys), inputs.max_document_bytes)
    for item in DocumentReader(inputs, fields.keys):
        texts = texts_of(item, fields)
        if isinstance(texts, RejectedDocument):
            raise user_error("document-without-text", found=str(texts))
        yield from (Text(text) for text in texts if text.strip())


def _token_texts(prefix: str, tokenizer: Tokenizer) -> Iterator[Text]:
    dataset = open_token_file(prefix)
    for index in range(len(dataset)):
        ids = dataset.get(index).tolist()
        if ids[-1:] == [tokenizer.eod]:
            ids.pop()
        if ids:
            yield Text(tokenizer.decode(ids[ids[:1] == [tokenizer.bos] :]), ids)
