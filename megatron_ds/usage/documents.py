"""The documents of which samples have tokens, and the steps that read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron_ds.config.problems import user_error
from megatron_ds.data.validation import DataFiles
from megatron_ds.usage.run_data import RunData
from megatron_ds.usage.steps import Steps


@dataclass(frozen=True)
class DocumentTokens:
    """Consecutive tokens of a document in a sample."""

    prefix: str
    """Prefix of the document's token file."""
    document: int
    """Number of the document in the file."""
    first: int
    """Position of the first token in the document."""
    ids: list[int]
    is_first: bool
    """Whether the sample begins with these tokens: the first one is not a label."""
    is_last: bool
    """Whether the sample ends with these tokens: the last one is a label only."""

    def __contains__(self, role: tuple[int, bool]) -> bool:
        """Whether the sample has a token of the document as an input, or as a label.

        Args:
            role: Position of the token in the document, and whether it is an input.
        """
        token, is_input = role
        first = self.first + (self.is_first and not is_input)
        return first <= token < self.first + len(self.ids) - (self.is_last and is_input)

    @property
    def role(self) -> tuple[int, bool]:
        """The first token as an input or, if it is not an input, as a label."""
        return self.first, (self.first, True) in self


@dataclass(frozen=True)
class DocumentRead:
    """Tokens of a document that a step has read."""

    step: int
    position: int
    """Position of the sample in the data order."""
    dp_rank: int
    epoch: int
    """Number of times that the first of the tokens has been read, this time included."""
    first: int
    """Position of the first token in the document."""
    tokens: int
    """Number of tokens."""


def documents_of(steps: Steps, position: int) -> list[DocumentTokens]:
    """The documents of a sample, in its order, with their tokens.

    Args:
        steps: Steps that read the sample.
        position: Position of the sample in the data order.
    """
    documents: list[DocumentTokens] = []
    for piece in steps.pieces(position):
        file = steps.files.open(piece.prefix)
        index = int(np.searchsorted(file.document_index, piece.sequence, side="right")) - 1
        before = file.lengths[int(file.document_index[index]) : piece.sequence]
        first = int(before.sum(dtype=np.int64)) + piece.first
        ids = file.get(piece.sequence)[piece.first : piece.first + piece.size].tolist()
        last = documents[-1] if documents else None
        is_next = last is not None and (last.prefix, last.document) == (piece.prefix, index)
        if last is not None and is_next and last.first + len(last.ids) == first:
            documents[-1] = dataclasses.replace(last, ids=last.ids + ids)
        else:
            is_first = not documents
            documents.append(
                DocumentTokens(piece.prefix, index, first, ids, is_first, is_last=False)
            )
    if documents:
        documents[-1] = dataclasses.replace(documents[-1], is_last=True)
    return documents


def reads_of(run: RunData, name: str, index: int) -> tuple[str, list[DocumentRead]]:
    """Prefix of the file of a document, and where the steps of a run have read the document.

    Args:
        run: The run.
        name: End of the file's path.
        index: Number of the document in the file.

    Raises:
        UserError: If no file of the run, or more than one, has the name, or the file has fewer
            documents.
    """
    prefixes = dict[str, None]()
    earlier = list[DocumentTokens]()
    reads = list[DocumentRead]()
    positions = list[int]()
    dataset = None
    for steps in run.steps(1, run.last):
        if steps.dataset is not dataset:
            dataset = steps.dataset
            named = _files_named(steps.files, name)
            prefixes |= dict.fromkeys(named)
            if len(prefixes) > 1:
                files = ", ".join(prefixes)
                raise user_error("document-of-several-files", "document", files=files)
            positions = [sample for file in named for sample in _samples_of(steps, file, index)]
        for position in positions:
            step = steps.step_of(position)
            if step is not None:
                document = next(iter(prefixes)), index
                reads += _reads(steps, step, position, document, earlier)
    if not prefixes:
        raise user_error("document-of-no-file", "document", name=name, run=run.folder)
    return next(iter(prefixes)), reads


def _reads(
    steps: Steps,
    step: int,
    position: int,
    document: tuple[str, int],
    earlier: list[DocumentTokens],
) -> Iterator[DocumentRead]:
    """The reads of a document in a sample.

    Args:
        steps: Steps with the step.
        step: Step that reads the sample.
        position: Position of the sample in the data order.
        document: Prefix and number of the document.
        earlier: Tokens of the document that have been read before; receives the sample's.
    """
    for tokens in documents_of(steps, position):
        if (tokens.prefix, tokens.document) == document:
            yield DocumentRead(
                step=step,
                position=position,
                dp_rank=steps.dp_rank(position),
                epoch=1 + sum(tokens.role in others for others in earlier),
                first=tokens.first,
                tokens=len(tokens.ids),
            )
            earlier.append(tokens)


def _files_named(files: DataFiles, name: str) -> list[str]:
    """The token files of the training data whose path ends with a name."""
    groups = [group.sources for group in files.groups if group.split == "train"]
    prefixes = dict.fromkeys(source.prefix for sources in groups for source in sources)
    return [prefix for prefix in prefixes if f"/{prefix}".endswith(f"/{name}")]


def _samples_of(steps: Steps, prefix: str, document: int) -> list[int]:
    """Positions of the samples that have tokens of a document."""
    index = steps.files.open(prefix).document_index
    if document >= (size := len(index) - 1):
        texts = {"prefix": prefix, "document": document, "last": size - 1}
        raise user_error("document-beyond-file", "document", **texts)
    sequences = np.arange(index[document], index[document + 1])
    return [int(sample) for sample in steps.dataset.positions_of(prefix, sequences)]
