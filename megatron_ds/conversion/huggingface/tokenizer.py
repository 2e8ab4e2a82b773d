"""The tokenizer in a folder of `transformers`: found there, and written for `AutoTokenizer`.

A tokenizer is written as a tokenizer.json of its own ids, with the class that reads the file as it
is. It is read back and compared with the tokenizer of the run.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_ds.config import DataConfig, TokenizerConfig
from megatron_ds.config.problems import Problem, UserError
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.data.validation import CHECKED_DOCUMENTS, DataFiles
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.export.library import ExportedTokenizer, prefix_space
from megatron_ds.tokenizer.export.probe import check_export, first_difference
from megatron_ds.tokenizer.huggingface import PLAIN_CLASSES, SIDE_FILES, TOKENIZER_FILES
from megatron_ds.tokenizer.stored_files import read_files

OF_THE_MODEL = ("config.json", "generation_config.json")
"""Files next to a tokenizer's that an export writes itself."""
JSON = "tokenizer.json"
SETTINGS = SIDE_FILES[0]
PLAIN_CLASS = PLAIN_CLASSES[0]
"""Class that versions 4 and 5 of `transformers` know, unlike TokenizersBackend."""
CLASS_OF_FAMILY = {"qwen2": "Qwen2Tokenizer"}
"""Families for which `transformers` 5 takes its own class whatever tokenizer_config.json names."""
KEPT_SETTINGS = (
    "added_tokens_decoder",
    "additional_special_tokens",
    "chat_template",
    "extra_special_tokens",
    "clean_up_tokenization_spaces",
    "model_input_names",
    "model_max_length",
    "padding_side",
    "spaces_between_special_tokens",
    "truncation_side",
)
"""Keys that another class reads in the same way, apart from the names of special tokens."""
BPE_FILES = ("vocab.json", "merges.txt")


@dataclass(frozen=True)
class TokenizerFiles:
    """Tokenizer files and special ids that an export writes."""

    files: Mapping[str, bytes] = field(default_factory=dict)
    """Contents by name; empty if there is no tokenizer."""
    special_ids: Mapping[str, int] = field(default_factory=dict)
    """Ids by name, such as `pad_token_id`, of the tokens that tokenizer_config.json names."""

    @property
    def has_special_tokens(self) -> bool:
        """Whether tokenizer_config.json names a begin and an unknown token, if there is one."""
        if not self.files:
            return True
        settings = json.loads(self.files.get(SETTINGS, b"{}"))
        return all(settings.get(role) is not None for role in ("bos_token", "unk_token"))

    def with_special_tokens(self) -> TokenizerFiles:
        """The files with the end token as begin and unknown token, as far as there are none.

        No text gets other ids. Without a tokenizer or an end token the files stay as they are.
        """
        changed = dict(self.files)
        for name in SIDE_FILES:
            values = json.loads(changed.get(name, b"{}"))
            if (end := _text_of(values.get("eos_token"))) is not None:
                for role in ("bos_token", "unk_token"):
                    values[role] = _text_of(values.get(role)) or end
                changed[name] = (json.dumps(values, indent=2, ensure_ascii=False) + "\n").encode()
        return dataclasses.replace(self, files=changed)


def settings_of_folder(path: Path) -> dict[str, Any]:
    """Fields of `TokenizerConfig` for the tokenizer of a folder; empty if it has none."""
    if not any(file for pattern in TOKENIZER_FILES for file in path.glob(pattern)):
        return {}
    return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(path)}


def special_ids(
    settings: ModelSettings, names: Iterable[str], model_type: str, tokenizer: Mapping[str, int]
) -> dict[str, Any]:
    """Token ids by name.

    Unknown ones are None, because their class has defaults, which only a model of the same family
    had before.

    Args:
        settings: The settings of the model.
        names: The ids to write.
        model_type: The family to write.
        tokenizer: Ids of the exported tokenizer, for a model that is not one of `transformers`.
    """
    known = settings.special_ids
    if settings.model_type is None:
        known = {**tokenizer, **known}
    is_same = settings.model_type == model_type
    return {name: known.get(name) for name in names if name in known or not is_same}


def tokenizer_files(
    settings: ModelSettings,
    model_type: str,
    warn: Callable[[Problem], None],
    data: Mapping[str, Any] | None = None,
) -> TokenizerFiles:
    """The files of a tokenizer, whose ids have been compared with the ones of the run.

    Args:
        settings: The settings of the model, with its tokenizer.
        model_type: The family to write.
        warn: Called if there is no tokenizer, or some texts get other ids.
        data: Values by field of `DataConfig` of the training run; None for another model.

    Raises:
        UserError: If the exported tokenizer would give other ids for ordinary text.
    """
    config = settings.tokenizer_config
    if config is None or config.tokenizer_type == "NullTokenizer":
        warn(Problem("hf-tokenizer-not-exported"))
        return TokenizerFiles()
    is_hf = config.tokenizer_type == "HFTokenizer"
    try:
        copies = _copies(config)
    except UserError as error:
        warn(Problem("hf-tokenizer-inexpressible", why=str(error)))
        return TokenizerFiles()
    if is_hf and config.trust_remote_code:
        warn(Problem("hf-tokenizer-unchecked", path=config.tokenizer_model, why="it has code"))
        return TokenizerFiles(copies)
    try:
        tokenizer = build_tokenizer(config, tokenizer_vocab_size(settings))
        exported = tokenizer.exported()
    except UserError as error:
        if not is_hf:
            warn(Problem("hf-tokenizer-inexpressible", why=str(error)))
            return TokenizerFiles()
        warn(Problem("hf-tokenizer-unchecked", path=config.tokenizer_model, why=str(error)))
        return TokenizerFiles(copies)
    begins = begins_texts(config, tokenizer, exported, data, warn)
    has_template = is_hf and begins == tokenizer.adds_bos
    files = _files(config, exported, copies, begins=begins, has_template=has_template)
    ids = {
        f"{role}_id": exported.library.token_to_id(token)
        for role, token in exported.special.items()
    }
    content = files[JSON].decode()
    for problem in check_export(tokenizer, exported, content, begins=begins):
        warn(problem)
    rows = settings.model.vocab_size
    if exported.library.get_vocab_size(with_added_tokens=True) > rows:
        warn(Problem("hf-tokenizer-exceeds-rows", rows=rows))
    if name := CLASS_OF_FAMILY.get(model_type):
        _check_class(tokenizer, files, model_type, name, warn)
    return TokenizerFiles(files, ids)


def begins_texts(
    config: TokenizerConfig,
    tokenizer: Tokenizer,
    exported: ExportedTokenizer,
    data: Mapping[str, Any] | None,
    warn: Callable[[Problem], None],
) -> bool:
    """Whether the texts of a run begin with the begin token.

    Args:
        config: Its tokenizer.
        tokenizer: The same, built.
        exported: The same, exported.
        data: Values by field of `DataConfig` of the run; None for another model.
        warn: Called if its data cannot be read.
    """
    begins = tokenizer.adds_bos or config.tokenizer_type == "Llama2Tokenizer"
    is_hf = config.tokenizer_type == "HFTokenizer"
    if is_hf and tokenizer.bos is not None and data is not None:
        first = first_token(data)
        if first is not None:
            begins = first == tokenizer.bos
        elif begins:
            warn(Problem("hf-begin-token-unknown", token=exported.special["bos_token"]))
    return begins


def first_token(data: Mapping[str, Any]) -> int | None:
    """The token at the beginning of each document of a run.

    Args:
        data: Values by field of `DataConfig` of the run.

    Returns:
        None if the files cannot be read here; -1 if the documents begin with several tokens.
    """
    known = {item.name for item in dataclasses.fields(DataConfig)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in data.items()
        if name in known
    }
    first = set()
    try:
        files = DataFiles(DataConfig(**values))
        for prefix in files.train_prefixes:
            if not Path(f"{prefix}.idx").is_file():
                return None
            file = files.open(prefix)
            starts = file.document_index[:-1]
            ends = file.document_index[1:]
            sequences = starts[ends > starts][:CHECKED_DOCUMENTS]
            first |= {int(file.get(int(at))[0]) for at in sequences if file.lengths[at] > 0}
    except (UserError, OSError):
        return None
    return (first.pop() if len(first) == 1 else -1) if first else None


def tokenizer_vocab_size(settings: ModelSettings) -> int | None:
    """--vocab-size, to which a TikTokenizer is truncated."""
    is_tiktoken = settings.tokenizer.get("tokenizer_type") == "TikTokenizer"
    return settings.model.vocab_size if is_tiktoken else None


def _copies(config: TokenizerConfig) -> dict[str, bytes]:
    """The original files that other programs read, too, under the names that they look for."""
    files = {}
    for path, content in read_files(config).items():
        field_name, _, name = path.partition("/")
        if config.tokenizer_type == "HFTokenizer":
            model = Path(str(config.tokenizer_model))
            # A tokenizer.json may have another name.
            name = JSON if model.is_file() and name == model.name else name
        elif config.tokenizer_type == "GPT2BPETokenizer":
            name = BPE_FILES[field_name == "merge_file"]
        elif config.tokenizer_type.startswith("BertWordPiece"):
            name = "vocab.txt"
        else:
            continue
        if name not in OF_THE_MODEL:
            files[name] = content
    return files


def _files(
    config: TokenizerConfig,
    exported: ExportedTokenizer,
    copies: Mapping[str, bytes],
    *,
    begins: bool,
    has_template: bool,
) -> dict[str, bytes]:
    """The copies, with a tokenizer.json of the exported tokenizer and its settings.

    A tokenizer.json and settings that mean the same already are left as they are, if their template
    puts the begin token before texts as the run did (`has_template`).
    """
    begin = exported.special["bos_token"] if begins else None
    content = exported.to_json(begin)
    original: dict[str, Any] = json.loads(copies[SETTINGS]) if SETTINGS in copies else {}
    is_kept = has_template and JSON in copies and _same_tokenizer(copies[JSON], content)
    known = {"tokenizer_class": PLAIN_CLASS}
    if is_kept:
        content = copies[JSON].decode()
        changed = {**known, **original}
        if changed["tokenizer_class"] in (None, *PLAIN_CLASSES):
            changed |= known
    else:
        carried = {key: original[key] for key in KEPT_SETTINGS if key in original}
        changed = known | {"add_bos_token": begins, "add_eos_token": False} | carried
        changed.setdefault("clean_up_tokenization_spaces", False)
    for role, token in exported.special.items():
        if _text_of(changed.get(role)) != token:
            changed[role] = token
    if exported.keeps_special_text:
        changed["split_special_tokens"] = True
    if changed["tokenizer_class"] == PLAIN_CLASS and (space := prefix_space(content)) is not None:
        changed["add_prefix_space"] = space
    files = {**copies, JSON: content.encode()}
    if changed != original:
        files[SETTINGS] = (json.dumps(changed, indent=2, ensure_ascii=False) + "\n").encode()
    if config.tokenizer_type != "HFTokenizer":
        files[SIDE_FILES[1]] = (json.dumps(dict(exported.special), indent=2) + "\n").encode()
    return files


def _text_of(token: Any) -> Any:
    """The text of a special token in tokenizer_config.json, which may be an object."""
    return token.get("content") if isinstance(token, dict) else token


def _same_tokenizer(first: bytes, second: str) -> bool:
    """Whether two files of the library are equal, apart from what is around texts and padding."""
    around = ("post_processor", "padding", "truncation", "version")
    parsed = [json.loads(text) for text in (first, second)]
    for value in parsed:
        for name in around:
            value.pop(name, None)
        pairs = value["model"].get("merges", ())
        merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in pairs]
        value["model"] = {
            name: part for name, part in value["model"].items() if part not in (None, "", False)
        } | {"merges": merges}
    return bool(parsed[0] == parsed[1])


def _check_class(
    tokenizer: Tokenizer,
    files: Mapping[str, bytes],
    model_type: str,
    name: str,
    warn: Callable[[Problem], None],
) -> None:
    """Warns if the class that `transformers` 5 takes for a family gives other ids."""
    from megatron_ds.tokenizer.huggingface import PretrainedTokenizer

    with tempfile.TemporaryDirectory() as folder:
        for file, content in files.items():
            Path(folder, file).write_bytes(content)
        Path(folder, "config.json").write_text(json.dumps({"model_type": model_type}))
        try:
            theirs = PretrainedTokenizer(folder, False)
        except UserError as error:
            warn(Problem("hf-tokenizer-class", family=model_type, name=name, why=str(error)))
            return
        difference = first_difference(tokenizer, theirs)
    if difference is not None:
        why = f"other ids for {difference.text!r}"
        warn(Problem("hf-tokenizer-class", family=model_type, name=name, why=why))
