"""Tokenizers in Hugging Face's formats: a tokenizer.json, the folder of a pretrained tokenizer, or
the name of one on the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_ds.tokenizer.base import (
    Tokenizer,
    checked_size,
    fingerprint_of,
    library_errors,
    read_json,
)
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint, hashes_of

USUAL_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
NEEDED_FILES = ("vocab_file", "merges_file")
"""What a tokenizer of transformers calls the files that it cannot do without."""
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")


NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
"""A name on the Hub: `gpt2`, `bigscience/bloom`."""
HUB_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken")
CODE_FILES = ("*.py",)


def build_hf_tokenizer(path: str, *, trust_remote_code: bool = False) -> Tokenizer:
    """A tokenizer.json (or a folder with one) through `tokenizers`; else through `transformers`.

    path: may be a name on the Hub, whose files are then fetched, or taken from Hugging Face's local
    cache. trust_remote_code: run the Python code of the folder, in which its tokenizer is a class;
    it is read by `transformers` then.

    The text of a special token inside a document becomes that token, as in Megatron; unlike there,
    no begin or end token is added. Raises ValueError if nothing can be read.
    """
    folder = path
    if not os.path.exists(path) and NAME.fullmatch(path):
        folder = _fetched(path, HUB_FILES + (CODE_FILES if trust_remote_code else ()))
    if os.path.isdir(folder) and (trust_remote_code or needs_transformers(folder)):
        return PretrainedTokenizer(folder, trust_remote_code=trust_remote_code)
    file = os.path.join(folder, "tokenizer.json") if os.path.isdir(folder) else folder
    if os.path.isfile(file):
        return FileTokenizer(Path(file))
    raise ValueError(
        f"--tokenizer-model {path}: there is no such tokenizer.json and no such folder"
    )


def needs_transformers(path: str) -> bool:
    """Whether a tokenizer is fetched, or read by `transformers`, which takes seconds to load."""
    if not os.path.exists(path):
        return NAME.fullmatch(path) is not None
    return os.path.isdir(path) and not os.path.isfile(os.path.join(path, "tokenizer.json"))


def _fetched(name: str, files: Sequence[str]) -> str:
    """The folder with the files of a tokenizer on the Hub."""
    import huggingface_hub

    with library_errors(
        f"--tokenizer-model {name}: there is no such tokenizer.json and no such folder, and from "
        "the Hugging Face Hub it cannot be fetched"
    ):
        return huggingface_hub.snapshot_download(name, allow_patterns=list(files))


class FileTokenizer:
    """A tokenizer.json, by the `tokenizers` library.

    The file does not say which token ends a document: tokenizer_config.json or
    special_tokens_map.json beside it does (`eos_token`), else the first of the usual names that the
    vocabulary has is taken.
    """

    def __init__(self, file: Path) -> None:
        import tokenizers

        with library_errors(f"--tokenizer-model {file}: not a tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = checked_size(vocab, f"--tokenizer-model {file}")
        self.eod = vocab[_end_token(file, vocab)]
        self.fingerprint = fingerprint_of(
            "HFTokenizer", [self._tokenizer.to_str().encode(), str(self.eod).encode()]
        )
        self.identity = TokenizerFingerprint(
            "HFTokenizer", hashes_of([file]), self.vocab_size, self.eod
        )

    def tokenizer_json(self) -> str:
        return self._tokenizer.to_str()

    def added_tokens(self) -> Sequence[str]:
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class PretrainedTokenizer:
    """A folder by transformers' AutoTokenizer. Its own code is run only where that is allowed."""

    def __init__(self, folder: str, *, trust_remote_code: bool) -> None:
        from transformers import AutoTokenizer

        with library_errors(f"--tokenizer-model {folder}: no tokenizer can be read from it"):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
            vocab: dict[str, int] = self._tokenizer.get_vocab()
        # Without its files transformers makes an empty tokenizer, which encodes a text to nothing.
        names: dict[str, str] = self._tokenizer.vocab_files_names
        missing = [names[kind] for kind in NEEDED_FILES if kind in names]
        missing = [name for name in missing if not os.path.isfile(os.path.join(folder, name))]
        whole = names.get("tokenizer_file")  # does without the others
        if missing and not (whole and os.path.isfile(os.path.join(folder, whole))):
            raise ValueError(
                f"--tokenizer-model {folder}: it has no tokenizer.json and no {', '.join(missing)}"
            )
        self.vocab_size = checked_size(vocab, f"--tokenizer-model {folder}")
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"--tokenizer-model {folder}: it names no eos_token to end documents")
        self.eod = int(self._tokenizer.eos_token_id)
        files = [Path(folder) / name for name in sorted({*names.values(), *SIDE_FILES})]
        self.fingerprint = fingerprint_of(
            "HFTokenizer", [file.read_bytes() for file in files if file.is_file()]
        )
        self.identity = TokenizerFingerprint(
            "HFTokenizer",
            hashes_of(file for file in files if file.is_file()),
            self.vocab_size,
            self.eod,
        )

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:  # which transformers does not take
            return []
        encoded: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _end_token(file: Path, vocab: dict[str, int]) -> str:
    for side in SIDE_FILES:
        path = file.with_name(side)
        if not path.is_file():
            continue
        content = read_json(path, "--tokenizer-model")
        if not isinstance(content, dict):
            raise ValueError(f"--tokenizer-model {path}: must be one JSON object")
        token = content.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is None:
            continue
        if not isinstance(token, str) or token not in vocab:
            raise ValueError(
                f"--tokenizer-model {path}: its eos_token {token!r} is no token of {file}"
            )
        return token
    for token in USUAL_ENDS:
        if token in vocab:
            return token
    raise ValueError(
        f"--tokenizer-model {file}: no token to end documents is known: give eos_token in a "
        f"tokenizer_config.json beside it (looked for {', '.join(USUAL_ENDS)})"
    )
