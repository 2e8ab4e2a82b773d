"""Tokenizers in Hugging Face formats: a tokenizer.json, the folder of a pretrained tokenizer, or
its name on the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_ds.config.problems import UserError, option, user_error
from megatron_ds.tokenizer.base import (
    JsonTokenizer,
    Tokenizer,
    count_ids,
    import_library,
    library_errors,
    read_json,
)
from megatron_ds.tokenizer.fingerprint import hash_content

COMMON_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
REQUIRED_FILES = ("vocab_file", "merges_file")
"""Keys of `vocab_files_names`, in transformers, of the files without which a tokenizer is empty."""
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files next to tokenizer.json that name the end-of-document token."""
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken")
"""Files of which a folder with a tokenizer has at least one."""
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
"""Such as `gpt2` or `bigscience/bloom`."""
HUB_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")


def build_hf_tokenizer(path: str, trust_remote_code: bool) -> Tokenizer:
    """Loads a tokenizer.json with `tokenizers`, any other pretrained tokenizer with `transformers`.

    The text of a special token inside a document becomes that token, as in Megatron; unlike there,
    no begin or end token is added.

    Args:
        path: A tokenizer.json, a folder, or a name on the Hub; the latter is downloaded unless it
            is in Hugging Face's local cache.
        trust_remote_code: Run the Python code in the folder that defines its tokenizer.

    Raises:
        UserError: If no tokenizer can be loaded.
    """
    folder = _local_folder(path, trust_remote_code)
    if os.path.isdir(folder) and (trust_remote_code or needs_transformers(folder)):
        return PretrainedTokenizer(folder, trust_remote_code)
    file = os.path.join(folder, "tokenizer.json") if os.path.isdir(folder) else folder
    if os.path.isfile(file):
        return FileTokenizer(Path(file))
    raise user_error("tokenizer-not-found", path=path)


def pretrained_files(path: str, trust_remote_code: bool) -> list[Path]:
    """The files of a tokenizer that `build_hf_tokenizer` has loaded from the same path."""
    folder = Path(_local_folder(path, trust_remote_code, is_downloaded=True))
    if folder.is_file():
        beside = [folder.with_name(name) for name in SIDE_FILES]
        return [folder, *(file for file in beside if file.is_file() and file != folder)]
    patterns = _patterns(trust_remote_code)
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    # The list of a model's tensors, which may lie in the same folder, is large.
    return sorted(file for file in files if not file.name.endswith(".index.json"))


def _local_folder(path: str, trust_remote_code: bool, *, is_downloaded: bool = False) -> str:
    """The path itself if it exists, otherwise Hugging Face's cache of the name on the Hub.

    Raises:
        UserError: If it cannot be downloaded.
    """
    if os.path.exists(path) or not HUB_NAME.fullmatch(path):
        return path
    import huggingface_hub

    with library_errors("tokenizer-download-failed", name=path):
        return huggingface_hub.snapshot_download(
            path, allow_patterns=_patterns(trust_remote_code), local_files_only=is_downloaded
        )


def _patterns(trust_remote_code: bool) -> list[str]:
    return [*HUB_FILES, "*.py"] if trust_remote_code else [*HUB_FILES]


def needs_transformers(path: str) -> bool:
    """Whether a tokenizer is downloaded or loaded by `transformers`, which takes seconds."""
    if not os.path.exists(path):
        return HUB_NAME.fullmatch(path) is not None
    return os.path.isdir(path) and not os.path.isfile(os.path.join(path, "tokenizer.json"))


class FileTokenizer(JsonTokenizer):
    """A tokenizer.json, on the `tokenizers` library.

    The file does not name the token that ends a document. It is the `eos_token` of a
    tokenizer_config.json or special_tokens_map.json next to it, otherwise the first common end
    token in the vocabulary.
    """

    def __init__(self, file: Path) -> None:
        """
        Raises:
            UserError: If the file is not a tokenizer.json or no token ends documents.
        """
        import tokenizers

        with library_errors("tokenizer-json-invalid", file=file):
            self._tokenizer = tokenizers.Tokenizer.from_file(str(file))
            self._tokenizer.no_padding()
            self._tokenizer.no_truncation()
            vocab = self._tokenizer.get_vocab(with_added_tokens=True)
        self.vocab_size = count_ids(vocab, "tokenizer_model", file)
        self.eod = vocab[_end_token(file, vocab)]
        content = hash_content(self.tokenizer_json())
        self.fingerprint = self._fingerprint_of("HFTokenizer", [file], content=content)

    def added_tokens(self) -> Sequence[str]:
        return [token.content for token in self._tokenizer.get_added_tokens_decoder().values()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]


class PretrainedTokenizer(Tokenizer):
    """A folder, loaded by transformers' AutoTokenizer."""

    def __init__(self, folder: str, trust_remote_code: bool) -> None:
        """
        Args:
            folder: Folder of the tokenizer.
            trust_remote_code: Run the Python code in the folder.

        Raises:
            UserError: If the folder has no tokenizer, or no token ends documents.
        """
        transformers = import_library("transformers", f"{option('tokenizer_model')} {folder}")
        try:
            with library_errors("pretrained-tokenizer-unreadable", folder=folder):
                self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=trust_remote_code
                )
                vocab: dict[str, int] = self._tokenizer.get_vocab()
        except UserError:
            _raise_known_cause(Path(folder), trust_remote_code)
            raise
        names: dict[str, str] = self._tokenizer.vocab_files_names
        _check_files(Path(folder), names)
        self.vocab_size = count_ids(vocab, "tokenizer_model", folder)
        if self._tokenizer.eos_token_id is None:
            raise user_error("end-token-not-configured", folder=folder)
        self.eod = int(self._tokenizer.eos_token_id)
        files = [Path(folder) / name for name in sorted({*names.values(), *SIDE_FILES})]
        existing = filter(Path.is_file, files)
        backend = None if trust_remote_code else getattr(self._tokenizer, "backend_tokenizer", None)
        content = "" if backend is None else hash_content(backend.to_str())
        self.fingerprint = self._fingerprint_of("HFTokenizer", existing, content=content)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:  # transformers rejects an empty batch
            return []
        encoded: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return encoded

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))


def _raise_known_cause(folder: Path, trust_remote_code: bool) -> None:
    """Raises the problem of a folder that transformers cannot load, where its words mislead."""
    if not any(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern)):
        raise user_error("tokenizer-not-found", path=folder) from None
    if any(folder.glob("*.model")):
        import_library("sentencepiece", f"{option('tokenizer_model')} {folder}")
    config = folder / "tokenizer_config.json"
    if not trust_remote_code and config.is_file():
        code = read_json(config, "tokenizer_model").get("auto_map")
        if isinstance(code, dict) and "AutoTokenizer" in code:
            raise user_error("tokenizer-code-not-trusted", folder=folder) from None


def _check_files(folder: Path, names: Mapping[str, str]) -> None:
    """Without its files transformers builds an empty tokenizer, which encodes to nothing."""
    required = [names[kind] for kind in REQUIRED_FILES if kind in names]
    missing = ", ".join(name for name in required if not (folder / name).is_file())
    complete = names.get("tokenizer_file")  # replaces the others
    if missing and not (complete and (folder / complete).is_file()):
        raise user_error("pretrained-tokenizer-incomplete", folder=folder, missing=missing)


def _end_token(file: Path, vocab: Mapping[str, int]) -> str:
    for side in SIDE_FILES:
        path = file.with_name(side)
        token = read_json(path, "tokenizer_model").get("eos_token") if path.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(token, str) or token not in vocab:
                raise user_error("end-token-not-in-vocabulary", path=path, token=token, file=file)
            return token
    for token in COMMON_END_TOKENS:
        if token in vocab:
            return token
    raise user_error("end-token-unknown", file=file, common_end=", ".join(COMMON_END_TOKENS))
