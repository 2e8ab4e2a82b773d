"""Options of preprocessing, and the checks that need no reading of the inputs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_ds.config.checks import prefix_problems
from megatron_ds.config.fields import (
    exclusive_problem,
    field_problems,
    option_field,
    option_group,
    when,
)
from megatron_ds.config.problems import Problem
from megatron_ds.fileio.resumable import RECORD, WORK_SUFFIX
from megatron_ds.preprocess.documents.conversations import ConversationReader
from megatron_ds.preprocess.documents.inputs import QUARANTINE, InputSpec
from megatron_ds.preprocess.documents.parsing import TextFields
from megatron_ds.preprocess.documents.sentence_splitter import Splitter
from megatron_ds.preprocess.shards import Shard


@dataclass(frozen=True)
class PreprocessOptions:
    """Output and work."""

    inputs: InputSpec = option_group(InputSpec())
    output_prefix: str = option_field("", metavar="PREFIX", required=True)
    """Path prefix of the output files."""
    json_keys: tuple[str, ...] = option_field(
        ("text",), nargs="*", aliases=("json-key", "columns"), metavar="KEY"
    )
    """Keys or columns of the texts, each written to its own files; a.b is key b nested in a."""
    chat: bool = option_field(False)
    """Documents are conversations: the key messages, a list of {"role": ..., "content": ...}, and
    optionally tools, by the tokenizer's chat template. Only the assistant's answers have a loss."""
    chat_template: str | None = option_field(None, metavar="FILE", only_with=when(chat=True))
    """Template of --chat (default: chat_template.jinja or tokenizer_config.json next to the
    tokenizer)."""
    append_eod: bool = option_field(False)
    """Append the end-of-document token to each document."""
    prepend_bos: bool = option_field(False)
    """Begin each document with the tokenizer's begin token, unless it does already."""
    fail_on_bad_document: bool = option_field(False)
    """Stop at the first rejected document (default: skip it and list it in <prefix>.quarantine)."""
    workers: int = option_field(1, minimum=1)
    """Number of worker processes (default: one per core)."""
    chunk_size: int = option_field(512, minimum=1)
    """Number of documents sent to a worker process at a time."""
    splitter: Splitter | None = None
    """Splits texts into sentences, which become sequences."""
    conversations: ConversationReader | None = None
    """Reads the documents of --chat."""
    shard: Shard | None = None
    """The part of the input that is read; None for all of it."""
    resume: bool = option_field(False)
    """Continue an interrupted run with the same --output-prefix, inputs and settings, and warn if
    there is none; the output equals that of an uninterrupted run (default: no warning)."""
    overwrite: bool = option_field(False)
    """Start over and replace existing output (default: a run with the same inputs and settings is
    continued, or is complete; other output is an error)."""

    def stem(self, key: str) -> str:
        """Name of the pair of a key, without .bin and .idx."""
        return f"{key}_{'document' if self.splitter is None else 'sentence'}"

    def prefix(self, key: str) -> str:
        """Path of the pair of a key, without .bin and .idx."""
        return f"{self.output_prefix}_{self.stem(key)}"

    def existing_output(self) -> list[str]:
        """The files that a new run would replace: complete output and interrupted work."""
        files = [self.prefix(key) + suffix for key in self.json_keys for suffix in (".bin", ".idx")]
        work = os.path.join(self.output_prefix + WORK_SUFFIX, RECORD)
        return [path for path in (*files, work) if os.path.exists(path)]

    @property
    def quarantine(self) -> str:
        """The list of rejected documents, a JSON object per line."""
        return self.output_prefix + QUARANTINE

    @property
    def text_fields(self) -> TextFields:
        return TextFields(self.json_keys, self.inputs.max_document_bytes)

    def resume_settings(self, tokenizer_metadata: bytes) -> dict[str, Any]:
        """All that determines the output, which a resumed run must share.

        Args:
            tokenizer_metadata: Description of the tokenizer and the sentence splitter.
        """
        inputs = {name: value for name, value in vars(self.inputs).items() if name != "paths"}
        files = self.inputs.describe_files()
        return {
            "json_keys": self.json_keys,
            "append_eod": self.append_eod,
            **self._chat_settings(),
            **({"prepend_bos": True} if self.prepend_bos else {}),
            **inputs,
            # A position in the input is an index into the ordered list of files.
            "order of inputs": list(files),
            **files,
            "tokenizer and sentence splitter": tokenizer_metadata.decode(),
            **({} if self.shard is None else {"shard": str(self.shard)}),
        }

    def _chat_settings(self) -> dict[str, str]:
        if self.conversations is None:
            return {}
        template = self.conversations.template
        return {
            "chat template": template.source + template.source_with_tools,
            "special tokens of the chat template": str(sorted(template.tokens.items())),
        }

    def problems(self) -> Iterator[Problem]:
        """Problems that can be found before any work is done."""
        yield from field_problems(self)
        yield from self.inputs.problems()
        if self.output_prefix:
            yield from prefix_problems(self.output_prefix)
        if not self.json_keys:
            yield Problem("no-keys")
        for key in self.json_keys:
            if "/" in key or "\0" in key:
                yield Problem("key-not-a-file-name", key=key)
        if len(set(self.json_keys)) != len(self.json_keys):
            yield Problem("key-twice", json_keys=" ".join(self.json_keys))
        if self.chat:
            others = [name for name in ("append_eod", "prepend_bos") if getattr(self, name)]
            others += ["split_sentences"] if self.splitter is not None else []
            if others:
                reason = "a conversation has the tokens that its template writes"
                yield exclusive_problem("chat", *others, reason=reason)
            if len(self.json_keys) > 1:
                yield Problem("conversations-of-one-key", json_keys=" ".join(self.json_keys))
        if self.resume:
            yield from self.inputs.resume_problems()
