"""Trains a byte-level BPE on a jsonl file and writes GPT-2's two files, vocab.json and merges.txt.

The last token is <|endoftext|>, which ends a document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

END_OF_TEXT = "<|endoftext|>"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--input", type=Path, required=True, help="the jsonl file")
    parser.add_argument("--json-key", default="text", help="the key of the text")
    parser.add_argument("--vocab-size", type=int, default=4096, help="tokens, bytes included")
    parser.add_argument("--output-dir", type=Path, required=True, help="where the files go")
    arguments = parser.parse_args(argv)
    try:
        size = train(
            arguments.input, arguments.json_key, arguments.vocab_size, arguments.output_dir
        )
    except ValueError as error:
        parser.error(str(error))
    print(f"{size} tokens in {arguments.output_dir / 'vocab.json'}")
    return 0


def train(path: Path, key: str, vocab_size: int, folder: Path) -> int:
    """Number of tokens: vocab_size, or fewer if the text has no more pairs to merge.

    Raises ValueError for a vocabulary below the 256 bytes and <|endoftext|>, and for a bad line.
    """
    if vocab_size < 257:
        raise ValueError(f"--vocab-size {vocab_size}: the bytes and {END_OF_TEXT} alone are 257")
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        texts(path, key), vocab_size=vocab_size - 1, special_tokens=[], min_frequency=2
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_model(str(folder))
    vocab_file = folder / "vocab.json"
    vocab = json.loads(vocab_file.read_text(encoding="utf-8"))
    vocab[END_OF_TEXT] = len(vocab)
    vocab_file.write_text(json.dumps(vocab, ensure_ascii=False), encoding="utf-8")
    return len(vocab)


def texts(path: Path, key: str) -> Iterator[str]:
    """The texts of a jsonl file. Raises ValueError naming a line that has none."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)[key]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON object with the key {key!r}"
                ) from error
            if not isinstance(text, str):
                raise ValueError(f"{path}, line {number}: the value of {key!r} is not a text")
            yield text


if __name__ == "__main__":
    sys.exit(main())
