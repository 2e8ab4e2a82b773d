"""Tokenizer training: byte-level BPE, WordPiece and Unigram.

The same texts in the same order give the same files, byte for byte. Owns the settings of the
training libraries; must not know where texts come from.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import ByteLevelBPETokenizer, models, pre_tokenizers, trainers

from megatron_ds.config.checks import import_library
from megatron_ds.config.problems import Problem, raise_if_any, user_error
from megatron_ds.tokenizer.gpt2 import END_OF_TEXT, byte_level
from megatron_ds.tokenizer.wordpiece import MAX_WORD_CHARS, Splitter

KINDS = ("bpe", "wordpiece", "unigram")
WORDPIECE_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_ALPHABET = 1000
"""Number of characters, the most frequent ones, in a WordPiece vocabulary; words with others are
[UNK]."""
MIN_FREQUENCY = 2
"""Occurrences that a pair needs to be merged."""
MIN_BPE_SIZE = 257
"""The bytes and <|endoftext|>."""
WORDS_PER_TEXT = 1000
UNIGRAM_THREADS = 16
"""Constant on all machines: the order of summation changes the result in the last digits."""
MAX_SENTENCE_CHARS = 4096
"""Longer lines are split for Unigram training."""


def vocab_size_problems(method: str, vocab_size: int) -> Iterator[Problem]:
    """Checks a vocabulary size, as far as possible without the texts."""
    minimum = MIN_BPE_SIZE if method == "bpe" else 1
    if vocab_size < minimum:
        yield Problem("vocab-size-too-small", vocab_size=vocab_size, kind=method, minimum=minimum)


def train_bpe(texts: Iterable[str], vocab_size: int, folder: Path, *, show: bool = False) -> int:
    """Trains a byte-level BPE; its last token is <|endoftext|>, which ends documents.

    Args:
        texts: Training texts.
        vocab_size: Number of tokens; fewer if the texts have no more pairs to merge.
        folder: Receives vocab.json and merges.txt, GPT-2's files, and a tokenizer.json with the
            same ids.
        show: Show the library's progress.

    Returns:
        Number of tokens.

    Raises:
        UserError: If the vocabulary is smaller than the 256 bytes and <|endoftext|>.
    """
    raise_if_any(vocab_size_problems("bpe", vocab_size))
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(
        texts,
        vocab_size=vocab_size - 1,
        special_tokens=[],
        min_frequency=MIN_FREQUENCY,
        show_progress=show,
    )
    folder.mkdir(parents=True, exist_ok=True)
    trained.save_model(str(folder))
    vocab_file = folder / "vocab.json"
    vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
    vocab[END_OF_TEXT] = len(vocab)
    vocab_file.write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    complete = byte_level(models.BPE.from_file(str(vocab_file), str(folder / "merges.txt")))
    complete.add_special_tokens([END_OF_TEXT])
    complete.save(str(folder / "tokenizer.json"))
    return len(vocab)


def train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    folder: Path,
    *,
    lower_case: bool = True,
    show: bool = False,
) -> int:
    """Trains a WordPiece vocabulary.

    Args:
        texts: Training texts.
        vocab_size: Maximal number of tokens.
        folder: Receives vocab.txt.
        lower_case: Whether to train for BertWordPieceLowerCase instead of BertWordPieceCase.
        show: Show the library's progress.

    Returns:
        Number of tokens.

    Raises:
        UserError: If the special tokens and single characters exceed the vocabulary.
    """
    splitter = Splitter(lower_case)
    words: Counter[str] = Counter()
    for text in texts:
        words.update(splitter(text).split())
    for word in [word for word in words if len(word) > MAX_WORD_CHARS]:
        del words[word]
    fixed = [*WORDPIECE_SPECIAL, *_character_pieces(words)]
    if vocab_size < len(fixed):
        raise user_error("vocab-size-below-characters", vocab_size=vocab_size, num_fixed=len(fixed))
    # The library numbers single characters in an order that changes from run to run unless they
    # are given as special tokens.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        special_tokens=fixed,
        initial_alphabet=[token for token in fixed if len(token) == 1],
        limit_alphabet=MAX_ALPHABET,
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
    """Trains a SentencePiece Unigram model that is lossless for every text.

    Its first tokens are <unk>, <s> and </s>; characters without a token fall back to bytes.

    Args:
        texts: Training texts.
        vocab_size: Number of tokens; fewer if the texts do not have as many candidates.
        folder: Receives tokenizer.model.
        show: Show the library's progress.

    Returns:
        Number of tokens.

    Raises:
        UserError: If the vocabulary is too small or sentencepiece is not installed.
    """
    sentencepiece = import_library("sentencepiece", "training a unigram tokenizer")
    output = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(texts),
            model_writer=output,
            model_type="unigram",
            vocab_size=vocab_size,
            hard_vocab_limit=False,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            max_sentence_length=4 * MAX_SENTENCE_CHARS + 1,
            num_threads=UNIGRAM_THREADS,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            minloglevel=0 if show else 2,
        )
    except RuntimeError as error:
        raise user_error("unigram-training-failed", vocab_size=vocab_size, error=error) from error
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.model").write_bytes(output.getvalue())
    model = sentencepiece.SentencePieceProcessor(model_proto=output.getvalue())
    return int(model.get_piece_size())


def _character_pieces(words: Counter[str]) -> list[str]:
    """The most frequent characters; then, with ##, the ones that occur inside words."""
    counts: Counter[str] = Counter()
    for word, count in words.items():
        for char in word:
            counts[char] += count
    alphabet = sorted(counts, key=lambda char: (-counts[char], char))[:MAX_ALPHABET]
    inside = {char for word in words for char in word[1:]}.intersection(alphabet)
    return [*sorted(alphabet), *(f"##{char}" for char in sorted(inside))]


def _repeated(words: Counter[str]) -> Iterator[str]:
    """Each word as often as it was counted."""
    for word in sorted(words):
        remaining = words[word]
        while remaining > 0:
            yield " ".join([word] * min(remaining, WORDS_PER_TEXT))
            remaining -= WORDS_PER_TEXT


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.replace("\0", "\n").split("\n"):
            for start in range(0, len(line), MAX_SENTENCE_CHARS):
                yield line[start : start + MAX_SENTENCE_CHARS]
