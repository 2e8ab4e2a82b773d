"""Slow, independent reference implementations of the tokenizers.

BERT's follow the definitions of Devlin et al. (2018), published with the model; SentencePiece's
special tokens follow Megatron.
"""

from __future__ import annotations

import unicodedata
from typing import Any


def bert_words(text: str, lower_case: bool) -> list[str]:
    clean = ""
    for char in text:
        if char in "\t\n\r" or unicodedata.category(char) == "Zs":
            clean += " "
        elif char not in "\0\ufffd" and unicodedata.category(char) not in ("Cc", "Cf"):
            clean += f" {char} " if is_cjk(ord(char)) else char
    words: list[str] = []
    for word in clean.split():
        if lower_case:
            decomposed = unicodedata.normalize("NFD", word.lower())
            word = "".join(char for char in decomposed if unicodedata.category(char) != "Mn")
        parts = [f" {char} " if is_punctuation(char) else char for char in word]
        words += "".join(parts).split()
    return words


BLOCKS = """4E00-9FFF 3400-4DBF 20000-2A6DF 2A700-2B73F 2B740-2B81F 2B820-2CEAF F900-FAFF
2F800-2FA1F"""
CJK = [[int(bound, 16) for bound in block.split("-")] for block in BLOCKS.split()]


def is_cjk(code: int) -> bool:
    return any(first <= code <= last for first, last in CJK)


def is_punctuation(char: str) -> bool:
    return char in "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~" or unicodedata.category(char)[0] == "P"


def word_pieces(word: str, vocab: dict[str, int]) -> list[int]:
    """Repeatedly the longest matching piece; [UNK] for the word if none matches."""
    ids: list[int] = []
    start = 0
    if len(word) > 200:
        return [vocab["[UNK]"]]
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in vocab:
                ids.append(vocab[piece])
                start = end
                break
        else:
            return [vocab["[UNK]"]]
    return ids


def sentencepiece_with_special_tokens(model: Any, text: str, extra_ids: int) -> list[int]:
    """Megatron's SentencePieceTokenizer: splits the text at its first special token, repeatedly."""
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    special = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
    numbers = (model.pad_id(), model.bos_id(), model.eos_id())
    for number, name in zip(numbers, ("<PAD>", "<BOS>", "<EOS>"), strict=True):
        special.append(name if number < 0 else pieces[number])
    special += [f"<extra_id_{number}>" for number in range(extra_ids)]
    pieces += [token for token in special if token not in pieces]
    ids: list[int] = []
    while True:
        found = [(text.index(token), n) for n, token in enumerate(special) if token in text]
        if not found:
            return [*ids, *model.encode_as_ids(text)]
        at, order = min(found)
        ids += [*model.encode_as_ids(text[:at]), pieces.index(special[order])]
        text = text[at + len(special[order]) :]
