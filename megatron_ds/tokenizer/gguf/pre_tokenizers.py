"""How llama.cpp splits text into words, and which of its kinds a tokenizer has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from megatron_ds.config.data_files import read_table
from megatron_ds.tokenizer.base import library_errors

CONTRACTIONS = "<contractions>"
ANY_CONTRACTIONS = "<any-contractions>"
SPELLED = {
    CONTRACTIONS: ("'s|'t|'re|'ve|'m|'ll|'d", "'(?:[sdmt]|ll|ve|re)"),
    ANY_CONTRACTIONS: (
        "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])",
        "'(?i:[sdmt]|ll|ve|re)",
        "'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])",
        "(?i:'s|'t|'re|'ve|'m|'d|'ll)",
        "(?i:[sdmt]|ll|ve|re)",
    ),
}
"""Spellings of the endings of English words, in lower case and in any case; the first is used."""
GPT2 = f"{CONTRACTIONS}| ?\\p{{L}}+| ?\\p{{N}}+| ?[^\\s\\p{{L}}\\p{{N}}]+|\\s+(?!\\S)"
"""Split of the library's ByteLevel."""
CLASS = re.compile(r"(\[(?:\\.|[^\]\\])*\])")
"""A class of characters, in which a plus is one."""
POSSESSIVE = re.compile(r"([?+*]|\d\})\+")
BLANKS = r"|\s+(?!\S)"
"""Alternative after which the other blanks are one more."""
LAST = re.compile(r"(\|\\s\+?\$?)+$")
"""Alternatives at the end of an expression, which are what no other one matches."""


@dataclass(frozen=True)
class PreTokenizer:
    """One value of `tokenizer.ggml.pre`; pre_tokenizers.toml explains what it has."""

    splits: Sequence[str]
    also: Sequence[str] = ()
    engine: Sequence[str] = ()
    aliases: Sequence[str] = ()
    ignore_merges: bool = False
    begins: bool = False

    @property
    def applied(self) -> Any:
        """What llama.cpp applies, as pre-tokenizer of the library `tokenizers`."""
        return _library_of(self.engine or self.splits)

    @property
    def original(self) -> Any:
        """What the tokenizers apply that have this kind in llama.cpp."""
        return _library_of(self.splits)


def _library_of(splits: Sequence[str]) -> Any:
    """A byte-level pre-tokenizer of the library, with its own expression where that is the last."""
    has_own = splits[-1] == GPT2
    steps = [
        pre_tokenizers.Split(tokenizers.Regex(_expression(text)), "isolated")
        for text in (splits[:-1] if has_own else splits)
    ]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_own)
    return pre_tokenizers.Sequence([*steps, byte_level]) if steps else byte_level


PRE_TOKENIZERS = {name: PreTokenizer(**values) for name, values in read_table(__file__).items()}
BY_NAME = {
    name: splitter for key, splitter in PRE_TOKENIZERS.items() for name in (key, *splitter.aliases)
}
"""Kinds by all values that llama.cpp knows them by."""


def splits_of(state: Mapping[str, Any] | None) -> list[str]:
    """The regular expressions by which a byte-level tokenizer splits, in the spelling of
    pre_tokenizers.toml.

    Args:
        state: Value of `pre_tokenizer` in a tokenizer.json.

    Raises:
        ValueError: With the part that llama.cpp does not have.
    """
    steps = [*_steps(state)]
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise ValueError(f"the pre-tokenizer {_shown(state)}, which is not byte-level")
    return [text for step in steps if (text := _split(step))]


def original_splits(state: Mapping[str, Any] | None) -> list[str]:
    """The regular expressions as a tokenizer.json has them, and names of other steps."""
    return [step.get("pattern", {}).get("Regex", step["type"]) for step in _steps(state)]


def _steps(state: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    if state is not None and state["type"] == "Sequence":
        for step in state["pretokenizers"]:
            yield from _steps(step)
    elif state is not None:
        yield state


def _split(step: Mapping[str, Any]) -> str:
    """The expression of one step; "" if it splits nothing."""
    name = step["type"]
    if name == "ByteLevel":
        if step.get("add_prefix_space"):
            raise ValueError("a blank before each text and special token (add_prefix_space)")
        return GPT2 if step.get("use_regex", True) else ""
    if name == "Digits":
        return r"\p{N}" if step["individual_digits"] else r"\p{N}+"
    pattern = step.get("pattern", {})
    is_isolated = step.get("behavior") == "Isolated" and not step.get("invert")
    is_inverse = step.get("behavior") == "Removed" and step.get("invert")
    if name != "Split" or "Regex" not in pattern or not (is_isolated or is_inverse):
        raise ValueError(f"the pre-tokenizer {_shown(step)}")
    return spelled(pattern["Regex"])


def _shown(state: Any) -> str:
    return json.dumps(state, ensure_ascii=False)


def spelled(expression: str) -> str:
    """An expression in the spelling of pre_tokenizers.toml.

    A possessive quantifier is as good as a greedy one, since what follows it cannot match what it
    gave back.
    """
    expression = expression.replace("\r", r"\r").replace("\n", r"\n")
    for name in (ANY_CONTRACTIONS, CONTRACTIONS):
        for text in SPELLED[name]:
            expression = expression.replace(text, name)
    expression = "".join(
        part if part.startswith("[") else POSSESSIVE.sub(r"\1", part)
        for part in CLASS.split(expression)
    )
    expression = expression.replace(r"|\s+$|\s+(?!\S)", r"|\s+(?!\S)")
    expression = expression.replace(r"\p{N}{1}|", r"\p{N}|")
    expression = expression.replace(r"|\s*[\r\n]|", r"|\s*[\r\n]+|")
    expression = expression.replace(f"(?:{ANY_CONTRACTIONS})?", f"({ANY_CONTRACTIONS})?")
    expression = expression.replace(f"{ANY_CONTRACTIONS}?", f"({ANY_CONTRACTIONS})?")
    return LAST.sub("", expression)


def _expression(text: str) -> str:
    """The regular expression of a spelling."""
    for name, spellings in SPELLED.items():
        text = text.replace(name, spellings[0])
    return rf"{text}|\s+" if text.endswith(BLANKS) else text


def known_pre_tokenizer(splits: Sequence[str], *, ignore_merges: bool) -> str | None:
    """The kind with these splits, one of the tokenizer's `ignore_merges` first; None without."""
    names = [
        name
        for name, splitter in PRE_TOKENIZERS.items()
        if [*splits] in ([*splitter.splits], [*splitter.also])
    ]
    names.sort(key=lambda name: PRE_TOKENIZERS[name].ignore_merges != ignore_merges)
    return names[0] if names else None


def nearest(library: Any, words: Sequence[str]) -> tuple[str, int]:
    """The kind that splits most words like a tokenizer, and how many words it splits otherwise.

    Args:
        library: A tokenizer of the library.
        words: The words.
    """
    counts = {name: len(split_otherwise(library, name, words)) for name in PRE_TOKENIZERS}
    name = min(counts, key=counts.__getitem__)
    return name, counts[name]


def split_otherwise(library: Any, name: str, words: Sequence[str]) -> list[str]:
    """The words that a kind splits otherwise than a tokenizer of the library."""
    applied = PRE_TOKENIZERS[name].applied
    theirs = library.pre_tokenizer
    with library_errors("gguf-split-fails"):
        return [
            word
            for word in words
            if applied.pre_tokenize_str(word) != theirs.pre_tokenize_str(word)
        ]
