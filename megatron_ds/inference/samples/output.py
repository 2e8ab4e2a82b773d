"""Output of tools/generate_samples_gpt.py: each continuation as text, or as a JSON line."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_ds.inference.cli import log_rank0
from megatron_ds.inference.prompts import Prompt, replace_text_file
from megatron_ds.inference.samples.options import Options

if TYPE_CHECKING:
    from megatron_ds.tokenizer import Tokenizer


@dataclass(frozen=True)
class Continuation:
    """The continuation of a prompt."""

    prompt: Prompt
    ids: list[int]
    """New tokens."""
    logprobs: list[float] | None
    """Log-probability of every token of prompt and continuation but the first, if requested."""


def write_texts(options: Options, tokenizer: Tokenizer, results: Iterable[Continuation]) -> None:
    """Writes each prompt's text, from the new tokens, as soon as it is generated."""
    path = None if options.output_file is None else options.output_file[1]
    file = contextlib.nullcontext(sys.stdout) if path is None else replace_text_file(path)
    count = 0
    with file as stream:
        for count, result in enumerate(results, start=1):
            stream.write(shown(result, count, tokenizer, as_json=options.genfile is not None))
            stream.flush()
    if path is not None:
        log_rank0(f"wrote {count} texts to {path}")


def shown(result: Continuation, index: int, tokenizer: Tokenizer, *, as_json: bool) -> str:
    """A continuation as text or as a JSON line."""
    ids = result.ids
    prompt = result.prompt.text
    finished = ids[-1] in tokenizer.ends
    text = tokenizer.decode(ids[:-1] if finished else ids)
    if as_json:
        record: dict[str, Any] = {} if prompt is None else {"prompt": prompt}
        record |= {"text": text, "length": len(ids), "finished": finished}
        if result.logprobs is not None:
            record |= {"tokens": [*result.prompt.ids, *ids], "logprobs": result.logprobs}
        return json.dumps(record, ensure_ascii=False) + "\n"
    if prompt is None:
        return f"Sample {index}: {text}\n\n"
    return f"Context: {prompt}\nGenerated: {text}\n\n"
