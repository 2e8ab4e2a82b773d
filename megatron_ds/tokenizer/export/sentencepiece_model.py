"""SentencePiece models as tokenizers of the library `tokenizers`, with the same ids."""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer.export.charsmap import charsmap_normalizers
from megatron_ds.tokenizer.export.library import literal, replace
from megatron_ds.tokenizer.token_bytes import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Types of pieces."""
UNIGRAM, BPE, WORD, CHAR = range(1, 5)
"""Types of models."""
TYPES = {UNIGRAM: "unigram", BPE: "BPE", WORD: "word", CHAR: "char"}
NEVER_FOUND = (UNKNOWN, CONTROL, BYTE)
"""Types of pieces that no text has, not even a text that is equal to their names."""
NEVER = 1000.0
"""Distance of a score that is never chosen from the smallest one."""
UNKNOWN_PENALTY = 10.0
"""Distance of an unknown character's score from the smallest one, in both libraries."""
HIDDEN = "\U0005fffd"
"""A character that no text has."""


def read_model(content: bytes) -> Any:
    """The protocol buffer of a SentencePiece model.

    Raises:
        google.protobuf.message.DecodeError: For any other content.
    """
    from sentencepiece import sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(content)
    return model


def library_of(model: Any, path: str, names: Mapping[int, str]) -> Any:
    """The library's tokenizer of a model, without added tokens and post-processor.

    Args:
        model: Model that `read_model` returns.
        path: The file, for messages.
        names: Further tokens by id, after the model's pieces.

    Raises:
        UserError: If the library has no such model.
    """
    if reason := _unsupported(model):
        raise user_error("sentencepiece-model-not-exportable", path=path, reason=reason)
    user_defined = [piece.piece for piece in model.pieces if piece.type == USER_DEFINED]
    if model.trainer_spec.model_type == UNIGRAM:
        library = tokenizers.Tokenizer(_unigram(model, names))
    else:
        library = tokenizers.Tokenizer(_bpe(model, names))
        if user_defined:
            library.pre_tokenizer = _user_defined_words(library.model, user_defined)
    spec = model.normalizer_spec
    steps = [*charsmap_normalizers(spec.precompiled_charsmap, user_defined), *_spaces(model)]
    steps += _hidden_names(model, names)
    if steps:
        library.normalizer = normalizers.Sequence(steps)
    decoding = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if spec.add_dummy_prefix:
        is_suffix = model.trainer_spec.treat_whitespace_as_suffix
        pattern = tokenizers.Regex(r" \z" if is_suffix else r"\A ")
        decoding.append(decoders.Replace(pattern, ""))
    library.decoder = decoders.Sequence(decoding)
    return library


def pieces_of(model: Any, types: Collection[int]) -> list[str]:
    """The pieces of some types."""
    return [piece.piece for piece in model.pieces if piece.type in types]


def _unsupported(model: Any) -> str:
    """Feature of a model that the library does not support; "" if all are supported."""
    model_type = model.trainer_spec.model_type
    if model_type == WORD:
        return "its pieces are complete words (model_type word)"
    if model_type not in (UNIGRAM, BPE, CHAR):
        return f"its model_type {model_type} is unknown"
    if model_type != UNIGRAM and pieces_of(model, [UNUSED]):
        return "it has unused pieces"
    if not pieces_of(model, [UNKNOWN]) and not _has_all_bytes(model):
        return "it has no unknown piece"
    return ""


def _has_all_bytes(model: Any) -> bool:
    """Whether a BPE has a piece for each byte, so that no text is unknown."""
    is_bpe = model.trainer_spec.model_type == BPE and model.trainer_spec.byte_fallback
    return is_bpe and len(pieces_of(model, [BYTE])) == 256


def _spaces(model: Any) -> list[Any]:
    """Normalizers of spaces, which become SPACE."""
    spec = model.normalizer_spec
    is_suffix = model.trainer_spec.treat_whitespace_as_suffix
    space = SPACE if spec.escape_whitespaces else " "
    steps = []
    if spec.remove_extra_whitespaces:
        steps += [replace(r"\A +", ""), replace(" {2,}", " ")]
    if spec.escape_whitespaces:
        steps.append(normalizers.Replace(" ", SPACE))
    if spec.add_dummy_prefix and not is_suffix:
        steps.append(normalizers.Prepend(space))
    if spec.remove_extra_whitespaces:
        steps.append(replace(rf"{literal(space)}+\z", ""))
    if spec.add_dummy_prefix and is_suffix:
        # A zero-width match in an empty text would be replaced, too.
        steps.append(replace(r"(?m)(?<=.)\z", space))
    return steps


def _unigram(model: Any, names: Mapping[int, str]) -> Any:
    """A Unigram model.

    Control, byte and unused pieces get a score that no segmentation chooses. A user-defined piece
    has SentencePiece's own score, a little less than the best pieces for each of its bytes.
    """
    scores = [piece.score for piece in model.pieces if piece.type == NORMAL] or [0.0]
    smallest = min(scores)
    best = max(0.0, *scores)
    vocab = []
    for piece in model.pieces:
        name = piece.piece
        score = piece.score
        if piece.type == USER_DEFINED:
            score = _float32(len(name.encode()) * best - 0.1)
        elif piece.type != NORMAL:
            score = smallest - NEVER
        vocab.append((name, score))
    vocab += [(names[index], smallest - NEVER) for index in sorted(names)]
    if model.trainer_spec.byte_fallback:
        # A character without a piece scores less than a name with it, unless its byte is its piece.
        ids = {name: at for at, (name, _) in enumerate(vocab)}
        for char in _chars_without_piece(model):
            vocab[ids[f"<0x{ord(char):02X}>"]] = (char, smallest - UNKNOWN_PENALTY)
    unknown = next(at for at, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    return models.Unigram(vocab, unknown, byte_fallback=model.trainer_spec.byte_fallback)


def _hidden_names(model: Any, names: Mapping[int, str]) -> list[Any]:
    """Normalizers that hide the name of a token in a text from a Unigram's vocabulary.

    They replace a character that is unknown anyway.
    """
    spec = model.trainer_spec
    if spec.model_type != UNIGRAM or spec.byte_fallback:
        return []
    without = _chars_without_piece(model)
    patterns = []
    for name in [*pieces_of(model, NEVER_FOUND), *names.values()]:
        if at := next((at for at, char in enumerate(name) if char in without), -1) + 1:
            before, char, after = map(literal, (name[: at - 1], name[at - 1], name[at:]))
            patterns.append(f"(?<={before}){char}(?={after})" if before else f"{char}(?={after})")
    return [replace("|".join(patterns), HIDDEN)] if patterns else []


def _chars_without_piece(model: Any) -> set[str]:
    """Characters in names of control, unknown and byte pieces that no piece has."""
    chars = {char for name in pieces_of(model, NEVER_FOUND) for char in name if char.isascii()}
    return chars - set(pieces_of(model, [NORMAL, USER_DEFINED]))


def _bpe(model: Any, names: Mapping[int, str]) -> Any:
    """A BPE model; one of single characters merges nothing.

    SentencePiece merges each two neighbours that form a piece, the one of the highest score first.
    So each split of a piece is a merge.
    """
    vocab = {piece.piece: at for at, piece in enumerate(model.pieces)}
    vocab |= {name: index for index, name in names.items()}
    merges: list[tuple[str, str]] = []
    if model.trainer_spec.model_type == BPE:
        merges = _merges(model.pieces)
    return models.BPE(
        vocab,
        merges,
        unk_token=next(iter(pieces_of(model, [UNKNOWN])), None),
        fuse_unk=not model.trainer_spec.byte_fallback,
        byte_fallback=model.trainer_spec.byte_fallback,
        # A user-defined piece, which is split off, has no merges.
        ignore_merges=bool(pieces_of(model, [USER_DEFINED])),
    )


def _user_defined_words(model: Any, user_defined: Iterable[str]) -> Any:
    """The pre-tokenizer that makes words of user-defined pieces, which the model has as tokens.

    Another word that is the name of a token, such as `<s>`, is split where merges end.
    """
    longest = sorted(user_defined, key=lambda text: (-len(text), text))
    words = tokenizers.Regex("|".join(map(literal, longest)))
    model.ignore_merges = False
    breaks = []
    names = tokenizers.Tokenizer(model).get_vocab(with_added_tokens=False)
    for name in sorted(names.keys() - set(longest)):
        first = model.tokenize(name)[0]
        if (end := first.offsets[1]) < len(name):
            breaks.append(rf"\A{literal(name[:end])}(?={literal(name[end:])}\z)")
    model.ignore_merges = True
    steps = [pre_tokenizers.Split(words, "isolated")]
    if breaks:
        steps.append(pre_tokenizers.Split(tokenizers.Regex("|".join(breaks)), "isolated"))
    return pre_tokenizers.Sequence(steps)


def _merges(pieces: Iterable[Any]) -> list[tuple[str, str]]:
    scores = {piece.piece: piece.score for piece in pieces if piece.type == NORMAL}
    merges = []
    for piece in sorted(scores, key=scores.__getitem__, reverse=True):
        splits = ((piece[:at], piece[at:]) for at in range(len(piece) - 1, 0, -1))
        merges += [pair for pair in splits if pair[0] in scores and pair[1] in scores]
    return merges


def _float32(value: float) -> float:
    """Rounds to fp32, in which SentencePiece computes."""
    return float(struct.unpack("f", struct.pack("f", value))[0])
