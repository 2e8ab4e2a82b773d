"""The tokenizer in a file of llama.cpp as one of the library `tokenizers`, with its ids."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers
from tokenizers import pre_tokenizers as library_pre_tokenizers

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import option, user_error
from megatron_ds.tokenizer.base import library_errors
from megatron_ds.tokenizer.export import sentencepiece_model
from megatron_ds.tokenizer.export.library import special_tokens, template
from megatron_ds.tokenizer.gguf.keys import (
    ADD_BOS,
    ADD_PREFIX,
    BYTE,
    CHARSMAP,
    CONTROL,
    JSON,
    MERGES,
    MODEL,
    NORMAL,
    PRE,
    PREFIX,
    REMOVE_BLANKS,
    SCORES,
    TOKENS,
    TYPES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    special_ids,
    unused,
)
from megatron_ds.tokenizer.gguf.pre_tokenizers import BY_NAME

WORD_START = "\u2581"
"""Begins the tokens of a WordPiece vocabulary that begin words."""
CONTINUES = "##"
LONGEST_WORD = 1 << 30
"""Characters of a word that a WordPiece tokenizer splits; llama.cpp has no limit."""


@dataclass(frozen=True)
class GgufVocabulary:
    """The tokens of a file."""

    tokens: Sequence[str]
    types: Sequence[int]
    """Their types."""
    scores: Sequence[float]
    """Their scores; empty if there are none."""

    def of_type(self, *types: int) -> list[str]:
        """The tokens of some types, without the names of ids that have no token."""
        pairs = zip(self.tokens, self.types, strict=True)
        return [
            token
            for index, (token, its_type) in enumerate(pairs)
            if its_type in types and token != unused(index)
        ]


@dataclass(frozen=True)
class Built:
    """A tokenizer of a file."""

    library: Any
    """The tokenizer of the library."""
    sentencepiece: Any = None
    """The SentencePiece model with the same pieces, scores and types; None if it is none."""


def built(keys: Mapping[str, Any], path: str) -> Built:
    """Builds the tokenizer of a file.

    Args:
        keys: The file's keys.
        path: The file, for messages.

    Raises:
        UserError: If the kind of tokenizer is unknown, or the keys contradict each other.
    """
    name = keys.get(MODEL)
    build = BUILDERS.get(str(name))
    if build is None:
        known = ", ".join(BUILDERS)
        raise user_error("gguf-tokenizer-unknown", path=path, name=name, known=known)
    with library_errors("gguf-tokenizer-damaged", path=path):
        vocabulary = vocabulary_of(keys)
    result = build(keys, vocabulary, path)
    library = result.library
    if (original := _original(keys, vocabulary)) is not None:
        library = original
    else:
        special = vocabulary.of_type(CONTROL)
        if str(name) in ("llama", "t5"):
            special += vocabulary.of_type(UNKNOWN)
        elif user_defined := vocabulary.of_type(USER_DEFINED):
            added = [tokenizers.AddedToken(text, normalized=False) for text in user_defined]
            library.add_tokens(added)
        named = [vocabulary.tokens[index] for index in special_ids(keys).values()]
        library.add_special_tokens(special_tokens([*special, *named]))
    library.post_processor = template(library, begin_token(keys, vocabulary))
    return Built(library, result.sentencepiece)


def begin_token(keys: Mapping[str, Any], vocabulary: GgufVocabulary) -> str | None:
    """The token that texts begin with; None if they begin with none."""
    pre = BY_NAME.get(str(keys.get(PRE)))
    usual = keys[MODEL] in ("llama", "bert") or (pre is not None and pre.begins)
    index = special_ids(keys).get("bos_token")
    return vocabulary.tokens[index] if keys.get(ADD_BOS, usual) and index is not None else None


def vocabulary_of(keys: Mapping[str, Any]) -> GgufVocabulary:
    """The tokens of a file, without the unused ones at its end.

    Raises:
        ValueError: If lists have other lengths, or a token occurs twice.
    """
    tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(keys[TOKENS])]
    types = [int(one) for one in keys.get(TYPES, [NORMAL for _ in tokens])]
    scores = [float(score) for score in keys.get(SCORES, ())]
    if len(types) != len(tokens) or (scores and len(scores) != len(tokens)):
        lengths = f"{len(tokens)} tokens, {len(types)} types and {len(scores)} scores"
        raise ValueError(lengths)
    if len({*tokens}) != len(tokens):
        raise ValueError("a token occurs twice")
    size = len(tokens)
    while size > 0 and types[size - 1] == UNUSED:
        size -= 1
    return GgufVocabulary(tokens[:size], types[:size], scores[:size])


def _original(keys: Mapping[str, Any], vocabulary: GgufVocabulary) -> Any:
    """The tokenizer that the file was made from, if the file has it and its tokens are the file's;
    otherwise None."""
    content = keys.get(JSON)
    if not isinstance(content, str):
        return None
    try:
        library = tokenizers.Tokenizer.from_str(content)
    except Exception:  # the library raises no class of its own
        return None
    theirs = library.get_vocab(with_added_tokens=True)
    pairs = zip(vocabulary.tokens, vocabulary.types, strict=True)
    expected = {
        token: index
        for index, (token, its_type) in enumerate(pairs)
        if its_type != UNUSED and token != unused(index)
    }
    return library if theirs == expected else None


def _byte_level(keys: Mapping[str, Any], vocabulary: GgufVocabulary, path: str) -> Built:
    """A byte-level BPE."""
    splitter = BY_NAME.get(str(keys.get(PRE)))
    if splitter is None:
        values = {"name": keys.get(PRE), "known": ", ".join(sorted(BY_NAME))}
        raise user_error("gguf-splits-unknown", path=path, **values)
    with library_errors("gguf-tokenizer-damaged", path=path):
        vocab = {
            token: index
            for index, token in enumerate(vocabulary.tokens)
            if vocabulary.types[index] != UNUSED
        }
        model = models.BPE(vocab, [*_pairs(keys)], ignore_merges=splitter.ignore_merges)
        library = tokenizers.Tokenizer(model)
    library.pre_tokenizer = splitter.original
    library.decoder = decoders.ByteLevel()
    return Built(library)


def _pairs(keys: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The merges, whose first token has at least one character."""
    for merge in keys[MERGES]:
        at = merge.index(" ", 1)
        yield merge[:at], merge[at + 1 :]


def _sentencepiece(keys: Mapping[str, Any], vocabulary: GgufVocabulary, path: str) -> Built:
    """A BPE of characters and bytes, or a unigram: the SentencePiece model with these pieces."""
    import_library("sentencepiece", f"{option('tokenizer_model')} {path}")
    with library_errors("gguf-tokenizer-damaged", path=path):
        model = sentencepiece_model.read_model(b"")
        rows = zip(vocabulary.tokens, vocabulary.scores, vocabulary.types, strict=True)
        for index, (token, score, its_type) in enumerate(rows):
            has_no_token = its_type == UNUSED and token == unused(index)
            model.pieces.add(piece=token, score=score, type=CONTROL if has_no_token else its_type)
        is_unigram = keys[MODEL] == "t5"
        trainer = model.trainer_spec
        trainer.model_type = sentencepiece_model.UNIGRAM if is_unigram else sentencepiece_model.BPE
        trainer.byte_fallback = BYTE in vocabulary.types
        spec = model.normalizer_spec
        spec.add_dummy_prefix = bool(keys.get(ADD_PREFIX, not is_unigram))
        spec.remove_extra_whitespaces = bool(keys.get(REMOVE_BLANKS, False))
        spec.escape_whitespaces = True
        spec.precompiled_charsmap = bytes(keys.get(CHARSMAP, b""))
        library = sentencepiece_model.library_of(model, path, {})
    return Built(library, model)


def _word_pieces(keys: Mapping[str, Any], vocabulary: GgufVocabulary, path: str) -> Built:
    """A WordPiece vocabulary, in which a sign begins the tokens that begin words."""
    with library_errors("gguf-tokenizer-damaged", path=path):
        vocab = {}
        for index, (token, its_type) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, strict=True)
        ):
            if its_type in (CONTROL, UNKNOWN):
                name = token
            elif token.startswith(WORD_START):
                name = token.removeprefix(WORD_START)
            else:
                name = f"{CONTINUES}{token}"
            if its_type != UNUSED:
                vocab[name] = index
        unknown = vocabulary.tokens[special_ids(keys)["unk_token"]]
        library = tokenizers.Tokenizer(
            models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=LONGEST_WORD)
        )
    is_lower = bool(keys.get(f"{PREFIX}normalizer.lowercase", True))
    strips = bool(keys.get(f"{PREFIX}normalizer.strip_accents", is_lower))
    library.normalizer = normalizers.BertNormalizer(lowercase=is_lower, strip_accents=strips)
    library.pre_tokenizer = library_pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    return Built(library)


Builder = Callable[[Mapping[str, Any], GgufVocabulary, str], Built]
BUILDERS: dict[str, Builder] = {
    "gpt2": _byte_level,
    "llama": _sentencepiece,
    "t5": _sentencepiece,
    "bert": _word_pieces,
}
"""Functions that build the kinds of tokenizers."""
