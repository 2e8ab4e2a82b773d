"""Exact and near-duplicate detection."""

from __future__ import annotations

import json
import random
import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest

from megatron_ds.cleaning import deduplication
from megatron_ds.cleaning.deduplication import (
    ExactHash,
    LshIndex,
    MinHashSignature,
    NearOptions,
    SeenHashes,
    shingles,
)
from megatron_ds.cleaning.find_duplicates import (
    DuplicateOptions,
    Position,
    SignatureWorker,
    SignedDocument,
)
from megatron_ds.cleaning.stages import Document
from megatron_ds.preprocess.documents.formats import RawDocument
from megatron_ds.preprocess.documents.parsing import RejectedDocument
from tests.problems import codes

WORDS = [f"word{number}" for number in range(5000)]


def text_of(rng: random.Random, words: int) -> list[str]:
    return rng.choices(WORDS, k=words)


def edited(rng: random.Random, words: list[str], edits: int) -> list[str]:
    """Replace `edits` words at equal distances; each changes five 5-word shingles."""
    changed = list(words)
    step = len(words) // edits if edits else 0
    for number in range(edits):
        changed[number * step + rng.randrange(5)] = rng.choice(WORDS)
    return changed


def jaccard(one: list[str], other: list[str]) -> float:
    a, b = (shingles(" ".join(words), 5, "words") for words in (one, other))
    return len(a & b) / len(a | b)


def keys_of(options: NearOptions, texts: list[list[str]]) -> list[bytes]:
    near = MinHashSignature(options)
    return [near(Document(" ".join(words), None)).key for words in texts]


def test_exact_duplicates_ignore_case_and_whitespace() -> None:
    exact = ExactHash()
    index = SeenHashes()

    def claim(text: str) -> str | None:
        return index.add_or_reject(exact(Document(text, None)).key)

    assert claim("Some text,\n\nof two lines") is None
    assert claim("some  TEXT, of two lines\n") == "exact duplicate"
    assert claim("some text of two lines") is None


def test_near_duplicates_are_found_and_others_are_kept() -> None:
    """Recall is at least 95% and the false positive rate at most 5%.

    Each of 200 texts of 200 words has a near copy (Jaccard 0.86 to 1) and a far copy (below 0.7).
    MinHash with 128 values estimates 0.8 with a standard error of 0.035.

    Claim (cleaning): near-duplicates are found, and other documents are kept
    """
    rng = random.Random(1)
    options = NearOptions()
    index = LshIndex(options)
    originals = [text_of(rng, 200) for _ in range(200)]
    for key in keys_of(options, originals):
        assert index.add_or_reject(key) is None
    close = [edited(rng, words, number % 4) for number, words in enumerate(originals)]
    far = [edited(rng, words, 8) for words in originals]
    assert min(map(jaccard, originals, close)) > 0.85
    assert max(map(jaccard, originals, far)) < 0.7
    found = [index.most_similar(key) for key in keys_of(options, close)]
    right = [pair is not None and pair[0] == number for number, pair in enumerate(found)]
    assert sum(right) >= 190
    wrong = [index.most_similar(key) for key in keys_of(options, far)]
    assert sum(pair is not None for pair in wrong) <= 10


def test_signature_depends_on_the_seed() -> None:
    words = [WORDS[:50]]
    assert keys_of(NearOptions(seed=1), words) == keys_of(NearOptions(seed=1), words)
    assert keys_of(NearOptions(seed=1), words) != keys_of(NearOptions(seed=2), words)


def test_shingles_of_words_and_of_characters() -> None:
    assert shingles("A b, c. D", 2, "words") == {"a b", "b c", "c d"}
    assert shingles("A b", 5, "words") == {"a b"}
    assert shingles("Ab \n c", 3, "characters") == {"ab ", "b c"}
    assert shingles("", 3, "characters") == {""}
    assert shingles("...!!! ???", 5, "words") != shingles("--- ***", 5, "words")
    assert shingles("\N{FIRE}\N{ROCKET}", 5, "words") == {"\N{FIRE}\N{ROCKET}"}


def test_ids_of_listed_duplicates_may_be_numbers() -> None:
    rows = [{"id": 7, "text": "a"}, {"id": "x", "text": "a"}, {"id": 1.5, "text": "a"}]
    items = [RawDocument("f", at, json.dumps(row).encode()) for at, row in enumerate(rows, 1)]
    worker = SignatureWorker(MinHashSignature(NearOptions()))
    first, second, third = worker((items, "id", Position()))[0]
    assert isinstance(first, SignedDocument)
    assert isinstance(second, SignedDocument)
    assert (first.name, second.name) == ("7", "x")
    assert isinstance(third, RejectedDocument)


def test_inputs_of_a_list_of_duplicates_are_pairs() -> None:
    options = DuplicateOptions(inputs=("a.json", "id", "b.json"), output="list")
    assert "inputs-not-pairs" in codes(options.problems())


@pytest.mark.parametrize(
    ("threshold", "num_perm", "bands"), [(0.8, 128, 16), (0.5, 128, 64), (0.95, 128, 8), (1, 64, 1)]
)
def test_bands_find_pairs_at_the_threshold(threshold: float, num_perm: int, bands: int) -> None:
    options = NearOptions(near_duplicate_threshold=threshold, num_perm=num_perm)
    assert options.bands == bands
    rows = num_perm // bands
    assert 1 - (1 - threshold**rows) ** bands >= 0.9


def test_texts_without_a_common_band_are_no_candidates_whatever_their_slots() -> None:
    """Otherwise which texts are dropped would depend on the size of the tables."""
    options = NearOptions()
    rng = np.random.default_rng(4)
    index = LshIndex(options)
    for _ in range(400):
        values = rng.integers(1 << 16, size=options.num_perm, dtype=np.uint16)
        index.reload(values.tobytes())
        values[:: options.num_perm // options.bands] ^= 1  # one value of each band
        assert index.most_similar(values.tobytes()) is None


def test_index_equals_pairwise_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks make the tables grow; short signatures give shared bands and threshold pairs."""
    monkeypatch.setattr(deduplication, "BLOCK", 8)
    options = NearOptions(near_duplicate_threshold=0.5, num_perm=16)
    rng = np.random.default_rng(4)
    keys = rng.integers(4, size=(400, 16), dtype=np.uint16)
    index = LshIndex(options)
    kept: list[npt.NDArray[np.uint16]] = []
    for key in keys:
        similar = [
            (float((key == other).mean()), -number)
            for number, other in enumerate(kept)
            if (key == other).reshape(options.bands, -1).all(1).any()
        ]
        best = max(similar, default=(0.0, 0))
        found = (-best[1], best[0]) if best[0] >= options.near_duplicate_threshold else None
        assert index.most_similar(key.tobytes()) == found
        assert index.add_or_reject(key.tobytes()) == (None if found is None else "near duplicate")
        if found is None:
            kept.append(key)
    assert 50 < len(kept) < 350
    reloaded = LshIndex(options)
    for key in kept:
        reloaded.reload(key.tobytes())
    for key in keys:
        assert reloaded.most_similar(key.tobytes()) == index.most_similar(key.tobytes())


def test_memory_per_document_is_bounded() -> None:
    """Signatures, chains and slots take less than 0.6 KB per document, also while tables grow."""
    index = LshIndex(NearOptions())
    keys = np.random.default_rng(5).integers(1 << 16, size=(20_000, 128), dtype=np.uint16)
    tracemalloc.start()
    try:
        for key in keys:
            index.reload(key.tobytes())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 600 * len(keys)
    assert index.most_similar(keys[-1].tobytes()) == (len(keys) - 1, 1.0)
