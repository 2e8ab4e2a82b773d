"""Tokenizers in Hugging Face formats: a tokenizer.json, the folder of a pretrained tokenizer, or
its name on the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import Problem, UserError, option, user_error, warn_of
from megatron_ds.tokenizer.base import (
    JsonTokenizer,
    Tokenizer,
    count_ids,
    library_errors,
    read_bytes,
    read_json,
)
from megatron_ds.tokenizer.chat_template import TEMPLATE_FILE
from megatron_ds.tokenizer.end_tokens import FILES as END_TOKEN_FILES
from megatron_ds.tokenizer.fingerprint import SPLIT, hash_content
from megatron_ds.tokenizer.token_bytes import library_token_bytes

if TYPE_CHECKING:
    from megatron_ds.tokenizer.export.library import ExportedTokenizer

COMMON_END_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|eot_id|>")
REQUIRED_FILES = ("vocab_file", "merges_file")
"""Keys of `vocab_files_names`, in transformers, of the files without which a tokenizer is empty."""
JSON_FILE = "tokenizer.json"
MODEL_FILE = "tokenizer.model"
BEGINNING_CLASSES = ("LlamaTokenizer", "GemmaTokenizer", "CodeLlamaTokenizer")
"""Classes that begin texts with a token unless their settings say otherwise."""
SIDE_FILES = ("tokenizer_config.json", "special_tokens_map.json")
"""Files next to tokenizer.json that name special tokens."""
SETTINGS_FILES = (*SIDE_FILES, "added_tokens.json", "config.json")
"""Files next to tokenizer.json that may change its ids."""
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of `transformers` that read a tokenizer.json as it is."""
PLAIN_MODELS = ("gpt2", "gpt_neox", "llama", "mistral", "mixtral")
"""Types of models with which `transformers` keeps these classes."""
HARMLESS_SETTINGS = (
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "backend",
    "chat_template",
    "errors",
    "clean_up_tokenization_spaces",
    "do_lower_case",
    "is_local",
    "legacy",
    "local_files_only",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "padding_side",
    "truncation_side",
)
"""Keys that do not change the ids of these classes."""
TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges*", "*.model", "*.tiktoken")
"""Files of tokenizers; every folder with a tokenizer has at least one."""
HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
"""Such as `gpt2` or `bigscience/bloom`."""
HUB_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")


def build_hf_tokenizer(path: str, trust_remote_code: bool) -> Tokenizer:
    """Loads a tokenizer.json with `tokenizers`, any other pretrained tokenizer with `transformers`.

    `transformers` also applies the settings next to a tokenizer.json that may change its ids.

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
    model = Path(folder, MODEL_FILE)
    if not trust_remote_code and model.is_file() and not model.with_name(JSON_FILE).is_file():
        return _read_model(model)
    if os.path.isdir(folder) and (trust_remote_code or needs_transformers(folder)):
        return PretrainedTokenizer(folder, trust_remote_code)
    file = Path(folder, "tokenizer.json") if os.path.isdir(folder) else Path(folder)
    if not file.is_file():
        raise user_error("tokenizer-not-found", path=path)
    library = _read_library(file)
    library.encode_special_tokens = _splits_special_tokens(file)
    setting = file.name == "tokenizer.json" and _effective_setting(file, library)
    if not setting:
        return FileTokenizer(file, library)
    loaded = _load_pretrained(file.parent, False, f" ({setting})")
    if getattr(loaded, "backend_tokenizer", None) is None:
        return PretrainedTokenizer(str(file.parent), False)
    return FileTokenizer(file, loaded.backend_tokenizer, loaded)


def _read_model(file: Path) -> Tokenizer:
    """The tokenizer of a SentencePiece model in a folder, by the type of the model.

    The classes of `transformers` 5 take each such file for a BPE without normalization.
    """
    from megatron_ds.tokenizer.export import sentencepiece_model as export
    from megatron_ds.tokenizer.export.library import special_tokens, template

    settings = file.with_name(SIDE_FILES[0])
    values = read_json(settings, "tokenizer_model") if settings.is_file() else {}
    named = str(values.get("tokenizer_class"))
    if _is_tiktoken(file):
        raise user_error("tokenizer-model-of-tiktoken", path=file)
    import_library("sentencepiece", f"{option('tokenizer_model')} {file}")
    with library_errors("sentencepiece-model-invalid", path=file):
        proto = export.read_model(read_bytes(file, "tokenizer_model"))
        library = export.library_of(proto, str(file), {})
    special = export.pieces_of(proto, (export.UNKNOWN, export.CONTROL))
    library.add_special_tokens(special_tokens(special))
    trainer = proto.trainer_spec
    ids = {"eos": trainer.eos_id, "bos": trainer.bos_id, "unk": trainer.unk_id}
    names = {
        f"{role}_token": proto.pieces[index].piece
        for role, index in ids.items()
        if 0 <= index < len(proto.pieces)
    }
    names |= {
        role: text for role in (*names, "pad_token") for text in _token_texts(values.get(role))
    }
    library.add_special_tokens(special_tokens(names.values()))
    _add_tokens(library, file, values)
    begins = values.get("add_bos_token", named.removesuffix("Fast") in BEGINNING_CLASSES)
    library.post_processor = template(library, names.get("bos_token") if begins else None)
    library.encode_special_tokens = _splits_special_tokens(file)
    loaded = _ModelTokens(
        library.token_to_id(names.get("eos_token", "")),
        library.token_to_id(names.get("bos_token", "")),
        names,
    )
    if named not in (*PLAIN_CLASSES, "None"):
        text = export.TYPES.get(trainer.model_type, "")
        warn_of(Problem("tokenizer-model-read-by-type", path=file, model_type=text, name=named))
    return FileTokenizer(file, library, loaded)


@dataclass(frozen=True)
class _ModelTokens:
    """The special tokens of a SentencePiece model in a folder."""

    eos_token_id: int | None
    bos_token_id: int | None
    special_tokens_map: Mapping[str, str]


def _is_tiktoken(file: Path) -> bool:
    """Whether a file has lines of base64 and rank."""
    first = read_bytes(file, "tokenizer_model")[:200].split(b"\n", 1)[0].split()
    return len(first) == 2 and first[1].isdigit()


def _add_tokens(library: Any, file: Path, settings: Mapping[str, Any]) -> None:
    """Adds the tokens of the settings next to a file that its vocabulary lacks, in order of id.

    Raises:
        UserError: If one has another id there.
    """
    import tokenizers

    added = {}
    others = file.with_name("added_tokens.json")
    if others.is_file():
        added = {index: token for token, index in read_json(others, "tokenizer_model").items()}
    decoder = settings.get("added_tokens_decoder")
    for index, token in (decoder if isinstance(decoder, dict) else {}).items():
        added[int(index)] = token
    for index, token in sorted(added.items()):
        state = token if isinstance(token, dict) else {"content": token}
        flags = {name: bool(state.get(name)) for name in ("lstrip", "rstrip", "single_word")}
        is_special = bool(state.get("special", True))
        text = str(state.get("content"))
        library.add_tokens(
            [tokenizers.AddedToken(text, special=is_special, normalized=False, **flags)]
        )
        if library.token_to_id(text) != index:
            raise user_error("added-token-of-other-id", path=file.parent, token=text, index=index)


def pretrained_files(path: str, trust_remote_code: bool) -> list[Path]:
    """The files of a tokenizer that `build_hf_tokenizer` has loaded from the same path."""
    folder = Path(_local_folder(path, trust_remote_code, is_downloaded=True))
    if folder.is_file():
        names = {*SETTINGS_FILES, TEMPLATE_FILE, *END_TOKEN_FILES}
        beside = [folder.with_name(name) for name in sorted(names)]
        return [folder, *(file for file in beside if file.is_file() and file != folder)]
    patterns = _patterns(trust_remote_code)
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    # The list of a model's tensors, which may be in the same folder, is large.
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
    files = (os.path.join(path, name) for name in (JSON_FILE, MODEL_FILE))
    return os.path.isdir(path) and not any(map(os.path.isfile, files))


def _read_library(file: Path) -> Any:
    """The tokenizer of `tokenizers` in a tokenizer.json."""
    import tokenizers

    content = read_bytes(file, "tokenizer_model")
    with library_errors("tokenizer-json-invalid", file=file):
        return tokenizers.Tokenizer.from_buffer(content)


def _effective_setting(file: Path, library: Any) -> str | None:
    """The first setting next to a tokenizer.json that may change its ids, with its file."""
    tokens = library.get_added_tokens_decoder()
    states = {str(token_id): token.__getstate__() for token_id, token in tokens.items()}
    ids = {token.content: token_id for token_id, token in tokens.items()}
    paths = [path for name in SETTINGS_FILES if (path := file.with_name(name)).is_file()]
    settings = {path.name: read_json(path, "tokenizer_model") for path in paths}
    if "config.json" in settings:
        has_class = settings.get(SIDE_FILES[0], {}).get("tokenizer_class") in PLAIN_CLASSES
        config = settings.pop("config.json")
        if not (has_class and config.get("model_type") in PLAIN_MODELS):
            names = "model_type", "tokenizer_class"
            settings["config.json"] = {name: config.get(name) for name in names}
    for name, values in settings.items():
        for key, value in values.items():
            if key == "split_special_tokens":
                is_known = isinstance(value, bool)  # applied to the library
            elif name == "added_tokens.json":
                is_known = ids.get(key) == value
            elif key == "tokenizer_class":
                is_known = value in (None, *PLAIN_CLASSES)
            elif key == "added_tokens_decoder" and isinstance(value, dict):
                is_known = all(states.get(token_id) == token for token_id, token in value.items())
            elif isinstance(value, str | list | dict) and key.endswith(("_token", "_tokens")):
                is_known = all(token in ids for token in _token_texts(value))
            else:
                is_known = not value
            if not (is_known or key in HARMLESS_SETTINGS):
                return f"{name}: {key}"
    return None


def _splits_special_tokens(file: Path) -> bool:
    """Whether the text of a special token stays text, by the settings next to a tokenizer.json."""
    settings = file.with_name(SIDE_FILES[0])
    is_named = file.name in (JSON_FILE, MODEL_FILE) and settings.is_file()
    return is_named and read_json(settings, "tokenizer_model").get("split_special_tokens") is True


def _token_texts(value: Any) -> list[str]:
    """The texts of the tokens in a setting: a text, an object with one, or many of them."""
    if isinstance(value, dict):
        return _token_texts(value.get("content", [*value.values()]))
    if isinstance(value, list):
        return [text for item in value for text in _token_texts(item)]
    return [value] if isinstance(value, str) else []


class FileTokenizer(JsonTokenizer):
    """A tokenizer.json, on the `tokenizers` library.

    The file does not name the token that ends a document. It is the `eos_token` of a
    tokenizer_config.json or special_tokens_map.json next to it, otherwise the first common end
    token in the vocabulary.
    """

    def __init__(self, file: Path, library: Any, loaded: Any = None) -> None:
        """
        Args:
            file: The file.
            library: The tokenizer of `tokenizers`.
            loaded: The tokenizer of `transformers`, if it applies settings next to the file.

        Raises:
            UserError: If no token ends documents.
        """
        self.folder = file.parent
        library.no_padding()
        library.no_truncation()
        self._tokenizer = library
        self._splits_tokens = library.encode_special_tokens
        self._names = _token_names(loaded)
        vocab = library.get_vocab(with_added_tokens=True)
        self.vocab_size = count_ids(vocab, "tokenizer_model", file)
        named = _named_token(file, "bos_token")[1]
        begin = vocab.get(named) if isinstance(named, str) else None
        end = getattr(loaded, "eos_token_id", None)
        self.bos = getattr(loaded, "bos_token_id", begin)
        self.adds_bos = self.bos is not None and library.encode("").ids[:1] == [self.bos]
        self.eod = vocab[_end_token(file, vocab)] if end is None else int(end)
        content = hash_content(self.tokenizer_json()) + SPLIT * self._splits_tokens
        beside = [file.with_name(name) for name in SETTINGS_FILES] if loaded else []
        files = [file, *filter(Path.is_file, beside)]
        options = {"split_special_tokens": 1} if self._splits_tokens and not loaded else {}
        self.fingerprint = self._fingerprint_of("HFTokenizer", files, options, content)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._tokenizer.encode_special_tokens = self._splits_tokens  # the library forgets it

    def library(self) -> Any:
        return self._tokenizer

    def exported(self) -> ExportedTokenizer:
        return _exported(self, self._tokenizer, self._names, self._splits_tokens)

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
        self.folder = Path(folder)
        self._tokenizer = _load_pretrained(self.folder, trust_remote_code)
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        names: dict[str, str] = self._tokenizer.vocab_files_names
        _check_files(Path(folder), names)
        self.vocab_size = count_ids(vocab, "tokenizer_model", folder)
        if self._tokenizer.eos_token_id is None:
            raise user_error("end-token-not-configured", folder=folder)
        self.eod = int(self._tokenizer.eos_token_id)
        self.bos = self._tokenizer.bos_token_id
        self.adds_bos = self.bos is not None and self._tokenizer("").input_ids[:1] == [self.bos]
        files = [Path(folder) / name for name in sorted({*names.values(), *SIDE_FILES})]
        existing = filter(Path.is_file, files)
        backend = self.library()
        if backend is not None:
            backend.encode_special_tokens = bool(self._tokenizer.split_special_tokens)
        if trust_remote_code:
            backend = None
        content = "" if backend is None else hash_content(backend.to_str())
        self.fingerprint = self._fingerprint_of("HFTokenizer", existing, content=content)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        if not texts:  # transformers rejects an empty batch
            return []
        encoded: list[list[int]] = self._tokenizer(
            list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        return encoded

    def library(self) -> Any:
        return getattr(self._tokenizer, "backend_tokenizer", None)

    def exported(self) -> ExportedTokenizer:
        if (backend := self.library()) is None:
            return super().exported()
        splits = bool(self._tokenizer.split_special_tokens)
        return _exported(self, backend, _token_names(self._tokenizer), splits)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def token_id(self, token: str) -> int | None:
        vocab: dict[str, int] = self._tokenizer.get_vocab()
        return vocab.get(token)

    def token_bytes(self) -> list[int] | None:
        backend = self.library()
        return None if backend is None else library_token_bytes(backend, self.vocab_size)


def _token_names(loaded: Any) -> dict[str, str]:
    """Special tokens of a tokenizer of `transformers` by name."""
    names = {} if loaded is None else loaded.special_tokens_map
    return {name: token for name, token in names.items() if isinstance(token, str)}


def _exported(
    tokenizer: Tokenizer, library: Any, names: Mapping[str, str], splits: bool
) -> ExportedTokenizer:
    from megatron_ds.tokenizer.export.library import ExportedTokenizer

    ids = {"eos_token": tokenizer.eod, "bos_token": tokenizer.bos}
    known = {name: library.id_to_token(index) for name, index in ids.items() if index is not None}
    return ExportedTokenizer(library, {**names, **known}, keeps_special_text=splits)


def _load_pretrained(folder: Path, trust_remote_code: bool, setting: str = "") -> Any:
    """The AutoTokenizer of a folder.

    Args:
        folder: The folder.
        trust_remote_code: Run the Python code in the folder.
        setting: The setting that needs it, for messages.
    """
    needed_by = f"{option('tokenizer_model')} {folder}{setting}"
    transformers = import_library("transformers", needed_by)
    try:
        with library_errors("pretrained-tokenizer-unreadable", folder=f"{folder}{setting}"):
            loaded = transformers.AutoTokenizer.from_pretrained(
                str(folder), local_files_only=True, trust_remote_code=trust_remote_code
            )
            loaded.get_vocab()
    except UserError:
        _raise_known_cause(folder, trust_remote_code)
        raise
    return loaded


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
    """Checks that the tokenizer's files exist. Without them transformers builds an empty tokenizer,
    which encodes every text to no tokens."""
    required = [names[role] for role in REQUIRED_FILES if role in names]
    missing = ", ".join(name for name in required if not (folder / name).is_file())
    complete = names.get("tokenizer_file")  # replaces all other ones
    if missing and not (complete and (folder / complete).is_file()):
        raise user_error("pretrained-tokenizer-incomplete", folder=folder, missing=missing)


def _named_token(file: Path, key: str) -> tuple[Path, Any]:
    """Finds the special token `key` in the files next to a tokenizer.json; returns the file and the
    token."""
    for path in map(file.with_name, SIDE_FILES):
        token = read_json(path, "tokenizer_model").get(key) if path.is_file() else None
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return path, token
    return file, None


def _end_token(file: Path, vocab: Mapping[str, int]) -> str:
    path, named = _named_token(file, "eos_token")
    if isinstance(named, str) and named in vocab:
        return named
    if named is not None:
        raise user_error("end-token-not-in-vocabulary", path=path, token=named, file=file)
    for token in COMMON_END_TOKENS:
        if token in vocab:
            return token
    raise user_error("end-token-unknown", file=file, common_end=", ".join(COMMON_END_TOKENS))
