"""Prompts in, texts out: the files of text generation. Must not know models or process groups."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from megatron_ds.config.checks import is_special_file
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.fileio.atomic import name_in_errors
from megatron_ds.tokenizer import Tokenizer

JSON_LINES = ".jsonl"
PROMPT_KEYS = ("prompt", "text")
"""Keys of a prompt in JSON lines."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue; None for a sample without a prompt."""

    text: str | None
    ids: list[int]


def read_prompt_file(path: Path) -> list[str]:
    r"""The prompts of a file.

    Each line is a prompt, or, in a file named *.jsonl, a JSON string or an object with the key
    prompt or text. Lines end with \n or \r\n and with no other separator of Unicode, since those
    occur in texts. A byte order mark is skipped.

    Raises:
        UserError: If the file is not UTF-8, or for every line without a prompt.
    """
    content = path.read_bytes()
    try:
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line_number = content.count(b"\n", 0, error.start) + 1
        raise user_error("prompt-file-not-utf8", path=path, line=line_number, error=error) from None
    if not lines[-1]:
        lines.pop()
    lines = [line.removesuffix("\r") for line in lines]
    if path.suffix.lower() != JSON_LINES:
        return lines
    prompts = [_prompt_of(line) for line in lines]
    raise_if_any(
        Problem("prompt-line-invalid", path=path, line=line_number)
        for line_number, prompt in enumerate(prompts, start=1)
        if prompt is None
    )
    return [prompt for prompt in prompts if prompt is not None]


def _prompt_of(line: str) -> str | None:
    """The prompt of a JSON line; None if it has none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if isinstance(value, dict):
        value = next((value[key] for key in PROMPT_KEYS if key in value), None)
    return value if isinstance(value, str) else None


def encode_prompts(texts: Sequence[str], tokenizer: Tokenizer) -> list[Prompt]:
    """Prompts of texts. One without tokens starts like a document, after the end of another.

    Raises:
        UserError: With a problem for each text that cannot be encoded.
    """
    prompts = list[Prompt]()
    problems = list[Problem]()
    for index, text in enumerate(texts, start=1):
        try:
            text.encode()  # bytes of a terminal that are not UTF-8 become lone surrogates
            ids = tokenizer.begin(tokenizer.encode(text))
            prompts.append(Prompt(text, ids or [tokenizer.prefix]))
        except UnicodeEncodeError:
            problems.append(Problem("prompt-not-unicode", number=index))
        except ValueError as error:
            problems.append(Problem("prompt-not-encodable", number=index, error=error))
    raise_if_any(problems)
    return prompts


@contextmanager
def replace_text_file(path: str) -> Iterator[TextIO]:
    """A text file that takes the place of PATH at the end.

    After an error or an interruption, what was written is in PATH.partial, which a note of the
    exception names, and PATH is as before. A device or a named pipe is written directly.
    """
    if is_special_file(path):
        with name_in_errors(path), open(path, "w", encoding="utf-8") as file:
            yield file
        return
    path = os.path.realpath(path)
    partial = f"{path}.partial"
    try:
        with name_in_errors(partial):
            with open(partial, "w", encoding="utf-8") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(partial, path)
    except BaseException as error:
        error.add_note(f"the texts so far are in {partial}")
        raise
