"""Plain statements of what the tokenizers do, slow and independent, to hold the real ones against.

BERT's are the definitions of Devlin et al. (2018) as published with the model; SentencePiece's
marks are Megatron's.
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
            apart = unicodedata.normalize("NFD", word.lower())
            word = "".join(char for char in apart if unicodedata.category(char) != "Mn")
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
    """The longest piece from the left, again and again; [UNK] for the word if none fits."""
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


def marked_sentencepiece(model: Any, text: str, extra_ids: int) -> list[int]:
    """Megatron's SentencePieceTokenizer: the first mark in the text is cut out, then the next."""
    pieces = [model.id_to_piece(number) for number in range(model.get_piece_size())]
    marks = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
    for number, name in (
        (model.pad_id(), "<PAD>"),
        (model.bos_id(), "<BOS>"),
        (model.eos_id(), "<EOS>"),
    ):
        marks.append(name if number < 0 else pieces[number])
    marks += [f"<extra_id_{number}>" for number in range(extra_ids)]
    for mark in marks:
        if mark not in pieces:
            pieces.append(mark)
    ids: list[int] = []
    while True:
        found = [(text.index(mark), order) for order, mark in enumerate(marks) if mark in text]
        if not found:
            return [*ids, *model.encode_as_ids(text)]
        at, order = min(found)
        ids += [*model.encode_as_ids(text[:at]), pieces.index(marks[order])]
        text = text[at + len(marks[order]) :]
