"""Byte-level BPE by tiktoken, from a file of tokens and their ranks."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from pathlib import Path

from megatron_ds.tokenizer.base import fingerprint_of, library, library_errors
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hashes_of

USUAL_SIZE = 1 << 17
"""Ids of a vocabulary whose number is not given, if the file has tokens for so many."""
BYTES = 256
"""Tokens that every file begins with."""
NEEDED = ("<unk>", "<s>", "</s>")
LETTERS = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
SMALL = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
PATTERNS = {
    "v1": "|".join(
        (
            r"[^\r\n\p{L}\p{N}]?+\p{L}+",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]++[\r\n]*",
            r"\s*[\r\n]",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
    "v2": "|".join(
        (
            rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS}]*[{SMALL}]+",
            rf"[^\r\n\p{{L}}\p{{N}}]?[{LETTERS}]+[{SMALL}]*",
            r"\p{N}",
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
            r"\s*[\r\n]+",
            r"\s+(?!\S)",
            r"\s+",
        )
    ),
}
"""How text is cut before tokens are merged: Megatron-LM's two ways."""


class TikTokenizer:
    """The file's tokens after `num_special` special ones: <unk>, <s>, </s>, ..., <SPECIAL_n>.

    The file is a JSON list of {"rank", "token_bytes" (base64), "token_str"}, as Megatron-LM reads,
    or lines of base64 and rank, as tiktoken writes. </s> ends documents; the text of a special
    token inside a document is plain text. vocab_size: number of ids, special ones included, to
    which the file is cut; None: 131072, or fewer if the file has fewer.

    Raises ValueError, naming file or flag.
    """

    def __init__(
        self,
        path: str,
        *,
        pattern: str,
        num_special: int,
        special: Sequence[str] | None,
        vocab_size: int | None,
    ) -> None:
        tiktoken = library("tiktoken", "--tokenizer-type TikTokenizer")
        tokens = _read(path)
        if vocab_size is None:
            vocab_size = min(USUAL_SIZE, num_special + len(tokens))
        if not BYTES <= vocab_size - num_special <= len(tokens):
            raise ValueError(
                f"--vocab-size {vocab_size}: --tokenizer-model {path} has {len(tokens)} tokens and "
                f"--tiktoken-num-special-tokens is {num_special}: from {num_special + BYTES} to "
                f"{num_special + len(tokens)} ids can be had"
            )
        names = list(NEEDED if special is None else special)
        names += [f"<SPECIAL_{number}>" for number in range(len(names), num_special)]
        ranks = {
            token: number
            for number, token in enumerate(tokens[: vocab_size - num_special], num_special)
        }
        self.vocab_size = vocab_size
        self.eod = names.index("</s>")
        self.bos, self.unk = names.index("<s>"), names.index("<unk>")
        settings: dict[str, str | int] = {
            "--tiktoken-pattern": pattern,
            "--tiktoken-num-special-tokens": num_special,
        }
        if special is not None:
            settings["--tiktoken-special-tokens"] = " ".join(special)
        self.fingerprint = fingerprint_of(
            "TikTokenizer",
            [Path(path).read_bytes(), json.dumps([settings, vocab_size]).encode()],
        )
        self.identity = TokenizerFingerprint(
            "TikTokenizer", hashes_of([path]), self.vocab_size, self.eod, settings
        )
        with library_errors(f"--tokenizer-model {path}: tiktoken cannot use it"):
            self._model = tiktoken.Encoding(
                "megatron_ds",
                pat_str=PATTERNS[pattern],
                mergeable_ranks=ranks,
                special_tokens={token: number for number, token in enumerate(names)},
            )

    def encode(self, text: str) -> list[int]:
        # Its regular expressions run out of stack in some 100 000 spaces: a panic, no Exception.
        with library_errors("TikTokenizer"):
            ids: list[int] = self._model.encode_ordinary(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))


def _read(path: str) -> list[bytes]:
    """The tokens in the order of their ranks."""
    source = f"--tokenizer-model {path}"
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{source}: cannot be read: {error.strerror}") from error
    try:
        if content.lstrip()[:1] == b"[":
            pairs = [(item["token_bytes"], item["rank"]) for item in json.loads(content)]
        else:
            rows = [line.split() for line in content.splitlines() if line.strip()]
            pairs = [(token, int(rank)) for token, rank in rows]
        ranks = {base64.b64decode(token, validate=True): rank for token, rank in pairs}
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise ValueError(
            f"{source}: neither a JSON list of rank, token_bytes and token_str nor lines of base64 "
            f"and rank: {type(error).__name__}: {error}"
        ) from None
    whole = all(type(rank) is int for rank in ranks.values())
    if not whole or set(ranks.values()) != set(range(len(pairs))):
        raise ValueError(
            f"{source}: {len(pairs)} tokens need the ranks 0 to {len(pairs) - 1}, each once"
        )
    tokens = sorted(ranks, key=ranks.__getitem__)
    if {bytes([byte]) for byte in range(BYTES)} - set(tokens[:BYTES]):
        raise ValueError(f"{source}: its first 256 tokens are not the 256 bytes")
    return tokens
