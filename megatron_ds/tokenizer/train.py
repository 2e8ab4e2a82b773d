"""Trains tokenizers on texts: byte-level BPE, WordPiece and Unigram.

The same texts in the same order give the same files, byte for byte. Owns the settings of the
libraries that train; must not know where texts come from.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import ByteLevelBPETokenizer, decoders, models, pre_tokenizers, trainers

from megatron_ds.tokenizer.base import library
from megatron_ds.tokenizer.gpt2 import END_OF_TEXT
from megatron_ds.tokenizer.wordpiece import LONGEST_WORD, Splitter

KINDS = ("bpe", "wordpiece", "unigram")
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
LARGEST_ALPHABET = 1000
"""Characters of a WordPiece vocabulary, the most frequent; words with others are [UNK]."""
LEAST_FREQUENT = 2
"""A pair is merged if it is seen so often."""
LEAST_BPE = 257
"""The bytes and <|endoftext|>."""
WORDS_AT_ONCE = 1000
UNIGRAM_THREADS = 16
"""Sums depend on it in their last digits: a constant, whatever the machine."""
LONGEST_SENTENCE = 4096
"""Characters that Unigram's training takes at once; longer lines are cut."""


def problems(kind: str, vocab_size: int) -> Iterator[str]:
    """What is wrong with a vocabulary's size, as far as it is known without texts."""
    if kind == "bpe" and vocab_size < LEAST_BPE:
        yield (f"--vocab-size {vocab_size}: the bytes and {END_OF_TEXT} alone are {LEAST_BPE}")
    elif vocab_size < 1:
        yield f"--vocab-size {vocab_size}: must be at least 1"


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, *, show: bool = False) -> int:
    """Writes vocab.json and merges.txt, GPT-2's files, and a tokenizer.json with the same ids.

    The last token is <|endoftext|>, which ends documents. Returns the number of tokens: vocab_size,
    or fewer if the texts have no more pairs to merge. Raises ValueError for a vocabulary below the
    256 bytes and <|endoftext|>.
    """
    for problem in problems("bpe", vocab_size):
        raise ValueError(problem)
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts,
        vocab_size=vocab_size - 1,
        special_tokens=[],
        min_frequency=LEAST_FREQUENT,
        show_progress=show,
    )
    folder.mkdir(parents=True, exist_ok=True)
    trained.save_model(str(folder))
    vocab_file = folder / "vocab.json"
    vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
    vocab[END_OF_TEXT] = len(vocab)
    vocab_file.write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    model = models.BPE.from_file(str(vocab_file), str(folder / "merges.txt"))
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    whole.add_special_tokens([END_OF_TEXT])
    whole.save(str(folder / "tokenizer.json"))
    return len(vocab)


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    folder: Path,
    *,
    lower_case: bool = True,
    show: bool = False,
) -> int:
    """Writes vocab.txt of BertWordPieceLowerCase, or of BertWordPieceCase; returns its tokens.

    Raises ValueError for a vocabulary that has no room for the characters.
    """
    splitter = Splitter(lower_case)
    words: Counter[str] = Counter()
    for text in texts:
        words.update(splitter(text).split())
    for word in [word for word in words if len(word) > LONGEST_WORD]:
        del words[word]
    fixed = [*WORDPIECE_SPECIAL, *_pieces_of_one(words)]
    if vocab_size < len(fixed):
        raise ValueError(
            f"--vocab-size {vocab_size}: the special tokens and the characters alone are "
            f"{len(fixed)}"
        )
    # The library numbers single characters in an order that changes from run to run, unless they
    # are there from the start.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=LEAST_FREQUENT,
        special_tokens=fixed,
        initial_alphabet=[token for token in fixed if len(token) == 1],
        limit_alphabet=LARGEST_ALPHABET,
        continuing_subword_prefix="##",
        show_progress=show,
    )
    trained = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trained.train_from_iterator(_repeated(words), trainer)
    vocab = trained.get_vocab()
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(f"{token}\n" for token in sorted(vocab, key=vocab.__getitem__))
    (folder / "vocab.txt").write_text(lines, encoding="utf-8")
    return len(vocab)


def train_unigram(
    texts: Iterable[str], vocab_size: int, folder: Path, *, show: bool = False
) -> int:
    """Writes tokenizer.model, a SentencePiece model that keeps every text as it is.

    <unk>, <s> and </s> are its first tokens; bytes stand for characters that it lacks. Returns the
    number of tokens, which is lower than vocab_size if the texts do not give so many. Raises
    ValueError for too small a vocabulary.
    """
    sentencepiece = library("sentencepiece", "--type unigram")
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=written,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * LONGEST_SENTENCE + 1,
            num_threads=UNIGRAM_THREADS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=0 if show else 2,
        )
    except RuntimeError as error:
        raise ValueError(f"--vocab-size {vocab_size}: {error}") from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(written.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    return int(model.get_piece_size())


def _pieces_of_one(words: Counter[str]) -> list[str]:
    """The characters that stand at the beginning of words, then those inside, with their ##."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            counts[char] += count
    kept = sorted(counts, key=lambda char: (-counts[char], char))[:LARGEST_ALPHABET]
    inside = {char for word in words for char in word[1:]}.intersection(kept)
    return [*sorted(kept), *(f"##{char}" for char in sorted(inside))]


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Each word as often as it was seen."""
    for word in sorted(words):
        left = words[word]
        while left > 0:
            yield " ".join([word] * min(left, WORDS_AT_ONCE))
            left -= WORDS_AT_ONCE


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.replace("\0", "\n").split("\n"):
            for start in range(0, len(line), LONGEST_SENTENCE):
                yield line[start : start + LONGEST_SENTENCE]
