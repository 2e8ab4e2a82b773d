"""The tokenizer in a file of llama.cpp, as an HFTokenizer."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.tokenizer.export.library import ExportedTokenizer
from megatron_ds.tokenizer.export.sentencepiece_model import pieces_of
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint
from megatron_ds.tokenizer.gguf.keys import (
    KEEPS_SPECIAL_TEXT,
    TOKENS,
    UNKNOWN,
    read_keys,
    special_ids,
)
from megatron_ds.tokenizer.gguf.library import Built, built
from megatron_ds.tokenizer.gguf.settings import settings_of
from megatron_ds.tokenizer.huggingface import JSON_FILE, PLAIN_CLASSES, SIDE_FILES, FileTokenizer


@dataclass(frozen=True)
class _Names:
    """The special tokens of a file."""

    eos_token_id: int | None
    bos_token_id: int | None
    special_tokens_map: Mapping[str, str]


class GgufTokenizer(FileTokenizer):
    """The tokenizer of a file of llama.cpp, with the ids that its tokens have there.

    It is the one of a folder with `tokenizer_files`, which checkpoints keep.
    """

    def __init__(self, file: Path) -> None:
        """
        Args:
            file: The file.

        Raises:
            UserError: If the kind of tokenizer is unknown, or no token ends documents.
        """
        keys = read_keys(file)
        built_tokenizer = built(keys, str(file))
        ids = special_ids(keys)
        names = {role: str(keys[TOKENS][index]) for role, index in ids.items()}
        self._content = hashlib.sha256(_json_of(built_tokenizer)).hexdigest()
        self._proto = built_tokenizer.sentencepiece
        library = built_tokenizer.library
        library.encode_special_tokens = bool(keys.get(KEEPS_SPECIAL_TEXT, False))
        super().__init__(file, library, _Names(ids.get("eos_token"), ids.get("bos_token"), names))
        self.folder = file

    def _fingerprint_of(
        self,
        name: str,
        files: Iterable[str | Path],
        settings: Mapping[str, str | int] | None = None,
        content: str = "",
    ) -> TokenizerFingerprint:
        """The fingerprint of the folder of `tokenizer_files`."""
        options = {"split_special_tokens": 1} if self._splits_tokens else {}
        hashes = {JSON_FILE: self._content}
        return TokenizerFingerprint(name, hashes, self.vocab_size, self.eod, options, content)

    def exported(self) -> ExportedTokenizer:
        exported = super().exported()
        if self._proto is None or not pieces_of(self._proto, [UNKNOWN]):
            return exported
        model = json.loads(exported.library.to_str())["model"]
        scores = [score for _, score in model["vocab"]] if model["type"] == "Unigram" else []
        return dataclasses.replace(exported, sentencepiece=self._proto, scores=scores)


def _json_of(tokenizer: Built) -> bytes:
    return str(tokenizer.library.to_str(pretty=True)).encode() + b"\n"


def tokenizer_files(file: Path) -> dict[str, bytes]:
    """The files of a folder with the tokenizer of a file of llama.cpp, by name.

    Raises:
        UserError: If the kind of tokenizer is unknown.
    """
    keys = read_keys(file)
    settings = (
        json.dumps(
            {"tokenizer_class": PLAIN_CLASSES[0], **settings_of(keys)}, indent=2, ensure_ascii=False
        )
        + "\n"
    )
    return {JSON_FILE: _json_of(built(keys, str(file))), SIDE_FILES[0]: settings.encode()}
