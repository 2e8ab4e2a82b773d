"""What is kept of a tokenizer beside its data, and what training says of another one's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.data.indexed_dataset import TOKENIZER_SUFFIX, IndexedDataset, IndexedWriter
from megatron_ds.data.tokenizer_metadata import made_by_of, read_made_by, tokenizer_mismatch
from megatron_ds.preprocess.document_readers import InputSpec
from megatron_ds.preprocess.pipeline import PreprocessOptions, preprocess
from megatron_ds.tokenizer.fingerprint import TokenizerFingerprint
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.training.preflight import check
from tests.unit.tokenizer.test_golden import FILES, FOLDER, tokenizer_of

ONE = TokenizerFingerprint(
    "A", {"vocab.json": "12" * 32, "merges.txt": "34" * 32}, 9, 8, {"--x": 1}
)
MODEL = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8 --micro-batch-size 1 "
    "--lr 1e-3 --train-iters 1 --eval-iters 0 --split 1,0,0"
)


def with_bytes(folder: Path, content: bytes) -> str:
    (folder / f"p{TOKENIZER_SUFFIX}").write_bytes(content)
    return str(folder / "p")


def pair(prefix: Path, made_by: bytes | None, tokens: int = 40) -> str:
    with IndexedWriter(prefix, np.uint16, made_by) as writer:
        writer.add_document(np.arange(tokens) % 7)
    return str(prefix)


def test_it_comes_back_from_its_file() -> None:
    again = TokenizerFingerprint.from_json(ONE.to_json())
    assert again == ONE
    assert again.same_as(ONE)
    assert str(ONE) == (
        "A (vocab.json 121212121212, merges.txt 343434343434, --x 1, 9 ids, end of document 8)"
    )


def test_it_is_the_same_with_files_of_other_names() -> None:
    assert ONE.same_as(
        TokenizerFingerprint("A", {"v": "12" * 32, "m": "34" * 32}, 9, 8, {"--x": 1})
    )


@pytest.mark.parametrize(
    "other",
    [
        TokenizerFingerprint("B", ONE.files, 9, 8, ONE.settings),
        TokenizerFingerprint("A", {"v": "34" * 32, "m": "12" * 32}, 9, 8, ONE.settings),
        TokenizerFingerprint("A", ONE.files, 10, 8, ONE.settings),
        TokenizerFingerprint("A", ONE.files, 9, 7, ONE.settings),
        TokenizerFingerprint("A", ONE.files, 9, 8, {"--x": 2}),
    ],
)
def test_each_part_counts(other: TokenizerFingerprint) -> None:
    assert not ONE.same_as(other)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b"\xff",
        b'{"kind": "A"}',
        json.dumps({**json.loads(ONE.to_json()), "eod": "8"}).encode(),
        json.dumps({**json.loads(ONE.to_json()), "files": ["x"]}).encode(),
        json.dumps({**json.loads(ONE.to_json()), "vocab_size": True}).encode(),
        b"[" * 100_000,
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    prefix = with_bytes(tmp_path, content)
    with pytest.raises(ValueError, match=r"p\.tokenizer\.json: holds no tokenizer's identity"):
        read_made_by(prefix)
    assert f"{prefix}{TOKENIZER_SUFFIX}: holds no tokenizer" in next(
        iter(tokenizer_mismatch(prefix, ONE))
    )


def test_no_file_is_no_error(tmp_path: Path) -> None:
    assert read_made_by(str(tmp_path / "p")) is None
    assert list(tokenizer_mismatch(str(tmp_path / "p"), ONE)) == []


def test_preprocessing_writes_it_for_every_key(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"a": "1", "b": "2 3"}\n')
    options = PreprocessOptions(
        inputs=InputSpec(paths=(str(tmp_path / "in.jsonl"),)),
        output_prefix=str(tmp_path / "out"),
        keys=("a", "b"),
    )
    preprocess(options, NullTokenizer(9))
    for key in "ab":
        found = read_made_by(str(tmp_path / f"out_{key}_document"))
        assert found == TokenizerFingerprint("NullTokenizer", {}, 10, 9)


def test_a_new_pair_takes_the_old_ones_file_away(tmp_path: Path) -> None:
    pair(tmp_path / "p", ONE.to_json())
    assert read_made_by(str(tmp_path / "p")) == ONE
    pair(tmp_path / "p", None, tokens=3)
    assert read_made_by(str(tmp_path / "p")) is None
    assert IndexedDataset(tmp_path / "p").get(0).size == 3
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "p", np.uint16, b"{}"):
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.bin", "p.idx"]


def test_of_pairs_that_are_put_together(tmp_path: Path) -> None:
    other = TokenizerFingerprint("B", {}, 9, 8)
    a, b = (pair(tmp_path / name, ONE.to_json()) for name in "ab")
    c, d = pair(tmp_path / "c", other.to_json()), pair(tmp_path / "d", None)
    assert made_by_of([a, b]) == ONE.to_json()
    assert made_by_of([a, d]) is None
    with pytest.raises(ValueError) as raised:
        made_by_of([a, d, c])
    assert f"{c} was made with {other} and {a} with {ONE}" in str(raised.value)


def problems(prefix: str, tokenizer: str) -> list[str]:
    words = f"{MODEL} --data-path {prefix} {tokenizer}".split()
    return build_config(words, world_size=1, warn=lambda _: None, check=check)[1]


def test_training_with_another_tokenizer_is_refused_and_shows_both(tmp_path: Path) -> None:
    made_with = NullTokenizer(100).identity
    prefix = pair(tmp_path / "p", made_with.to_json())
    assert problems(prefix, "--tokenizer-type NullTokenizer --vocab-size 100") == []
    (found,) = problems(prefix, "--tokenizer-type NullTokenizer --vocab-size 120")
    assert found.startswith(f"--data-path {prefix}: was made with another tokenizer: ")
    assert f"names {made_with}, and this run has {NullTokenizer(120).identity};" in found
    (tmp_path / f"p{TOKENIZER_SUFFIX}").unlink()
    assert problems(prefix, "--tokenizer-type NullTokenizer --vocab-size 120") == []


def test_every_part_of_a_mixture_is_looked_at(tmp_path: Path) -> None:
    right = pair(tmp_path / "a", NullTokenizer(100).identity.to_json())
    wrong = pair(tmp_path / "b", ONE.to_json())
    mixture = f"0.5 {right} 0.5 {wrong}"
    (found,) = problems(mixture, "--tokenizer-type NullTokenizer --vocab-size 100")
    assert found.startswith(f"--data-path {wrong}: was made with another tokenizer")


@pytest.mark.parametrize("kind", FILES)
def test_each_kinds_data_trains_with_that_kind_alone(kind: str) -> None:
    """The golden token files, against the tokenizers of all kinds."""
    for other in FILES:
        found = list(tokenizer_mismatch(str(FOLDER / kind), tokenizer_of(other).identity))
        assert bool(found) == (kind != other), other
