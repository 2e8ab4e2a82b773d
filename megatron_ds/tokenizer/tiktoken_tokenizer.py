"""Byte-level BPE on the `tiktoken` library, from a file of tokens and their ranks."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence

from megatron_ds.config.checks import import_library
from megatron_ds.config.data_files import read_table
from megatron_ds.config.options.tokenizer import REQUIRED_SPECIAL_TOKENS
from megatron_ds.config.problems import Problem, option, user_error, warn_of
from megatron_ds.tokenizer.base import Tokenizer, library_errors, read_bytes
from megatron_ds.tokenizer.export.library import ExportedTokenizer, special_tokens

DEFAULT_VOCAB_SIZE = 1 << 17
"""As in Megatron-LM; smaller if the file has fewer tokens."""
BYTE_TOKENS = 256
"""Tokens at the start of every file."""
PATTERNS: dict[str, str] = read_table(__file__)
"""Megatron-LM's two patterns that split text into words, within which tokens are merged."""


class TikTokenizer(Tokenizer):
    """Special tokens <unk>, <s>, </s>, ..., <SPECIAL_n>, followed by the tokens of a file.

    </s> ends documents. The text of a special token inside a document is encoded as ordinary text.
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
        """
        Args:
            path: A JSON list of {"rank", "token_bytes" (base64), "token_str"}, as of Megatron-LM,
                or lines of base64 and rank, as of tiktoken.
            pattern: Key of `PATTERNS`.
            num_special: Number of special tokens, which have the first ids.
            special: Names of the first special tokens (default: <unk>, <s>, </s>).
            vocab_size: Number of ids, special tokens included, to which the file is truncated
                (default: 131072, or as many as there are).

        Raises:
            UserError: If the file is damaged or has fewer tokens.
        """
        tiktoken = import_library("tiktoken", f"{option('tokenizer_type')} TikTokenizer")
        tokens = _read_tokens(path)
        if vocab_size is None:
            vocab_size = min(DEFAULT_VOCAB_SIZE, num_special + len(tokens))
        lowest, highest = num_special + BYTE_TOKENS, num_special + len(tokens)
        if not lowest <= vocab_size <= highest:
            raise user_error(
                "vocab-size-not-available",
                path=path,
                size=vocab_size,
                lowest=lowest,
                highest=highest,
                tokens=len(tokens),
                special=num_special,
            )
        names = list(REQUIRED_SPECIAL_TOKENS if special is None else special)
        names += [f"<SPECIAL_{index}>" for index in range(len(names), num_special)]
        kept = tokens[: vocab_size - num_special]
        ranks = {token: rank for rank, token in enumerate(kept, num_special)}
        self.vocab_size, self._num_special = vocab_size, num_special
        self._names, self._pattern = names, PATTERNS[pattern]
        self.eod = names.index("</s>")
        settings: dict[str, str | int] = {
            "--tiktoken-pattern": pattern,
            "--tiktoken-num-special-tokens": num_special,
        }
        if special is not None:
            settings["--tiktoken-special-tokens"] = " ".join(special)
        self.fingerprint = self._fingerprint_of("TikTokenizer", [path], settings)
        with library_errors("tiktoken-file-unusable", path=path):
            self._model = tiktoken.Encoding(
                "megatron_ds",
                pat_str=PATTERNS[pattern],
                mergeable_ranks=ranks,
                special_tokens={token: index for index, token in enumerate(names)},
            )

    def exported(self) -> ExportedTokenizer:
        from megatron_ds.tokenizer.export.tiktoken_ranks import byte_text, library_of

        ids = range(self._num_special, self.vocab_size)
        ranks = {self._model.decode_single_token_bytes(index): index for index in ids}
        # A token with the text of a special one must have another name.
        taken = set(map(byte_text, ranks))
        special = [name if name not in taken else f"<|{name}|>" for name in self._names]
        library = library_of(special, ranks, self._pattern)
        library.add_special_tokens(special_tokens(special))
        roles = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>"}
        names = {
            role: special[self._names.index(name)]
            for role, name in roles.items()
            if name in self._names
        }
        return ExportedTokenizer(library, names, keeps_special_text=True)

    def encode(self, text: str) -> list[int]:
        # On some 100,000 spaces, the library's regular expressions exhaust their stack and panic.
        with library_errors("text-not-encodable"):
            ids: list[int] = self._model.encode_ordinary(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._model.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        try:
            return int(self._model.encode_single_token(token))
        except KeyError:
            return None

    def token_bytes(self) -> list[int]:
        ids = range(self._num_special, self.vocab_size)
        texts = map(self._model.decode_single_token_bytes, ids)
        return [0] * self._num_special + [len(text) for text in texts]


def _read_tokens(path: str) -> list[bytes]:
    """Tokens of a file in order of rank."""
    file = f"{option('tokenizer_model')} {path}"
    content = read_bytes(path, "tokenizer_model")
    try:
        if content.lstrip()[:1] == b"[":
            pairs = [(item["token_bytes"], item["rank"]) for item in json.loads(content)]
        else:
            warn_of(Problem("tiktoken-ids-differ", file=file))
            rows = [line.split() for line in content.splitlines() if line.strip()]
            pairs = [(token, int(rank)) for token, rank in rows]
        ranks = {base64.b64decode(token, validate=True): rank for token, rank in pairs}
    except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
        raise user_error(
            "tiktoken-file-invalid", file=file, kind=type(error).__name__, error=error
        ) from None
    is_integer, size = all(type(rank) is int for rank in ranks.values()), len(pairs)
    if not is_integer or set(ranks.values()) != set(range(size)):
        raise user_error("token-ranks-not-contiguous", file=file, size=size, largest=size - 1)
    tokens = sorted(ranks, key=ranks.__getitem__)
    if {bytes([byte]) for byte in range(BYTE_TOKENS)} - set(tokens[:BYTE_TOKENS]):
        raise user_error("tiktoken-byte-tokens-missing", file=file)
    return tokens
