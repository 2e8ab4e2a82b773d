"""Which documents count as there before."""

from __future__ import annotations

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
from megatron_ds.cleaning.stages import Document

WORDS = [f"word{number}" for number in range(5000)]


def text_of(source: random.Random, words: int) -> list[str]:
    return source.choices(WORDS, k=words)


def edited(source: random.Random, words: list[str], edits: int) -> list[str]:
    """With so many words replaced, at equal distances: each changes five shingles of five words."""
    changed = list(words)
    step = len(words) // edits if edits else 0
    for number in range(edits):
        changed[number * step + source.randrange(5)] = source.choice(WORDS)
    return changed


def jaccard(one: list[str], other: list[str]) -> float:
    a, b = (shingles(" ".join(words), 5, "words") for words in (one, other))
    return len(a & b) / len(a | b)


def keys_of(options: NearOptions, texts: list[list[str]]) -> list[bytes]:
    near = MinHashSignature(options)
    return [near(Document(" ".join(words), None)).key for words in texts]


def test_exact_duplicates_differ_in_case_and_spaces_alone() -> None:
    exact, judge = ExactHash(), SeenHashes()

    def claim(text: str) -> str | None:
        return judge.add_or_reject(exact(Document(text, None)).key)

    assert claim("Some text,\n\nof two lines") is None
    assert claim("some  TEXT, of two lines\n") == "exact duplicate"
    assert claim("some text of two lines") is None


def test_near_duplicates_are_found_and_others_are_kept() -> None:
    """200 texts of 200 words, each with a copy edited a little (Jaccard 0.86 to 1) or much (below
    0.7): of the first at least 95 in 100 are found, of the others at most 5 in 100 taken for one.
    MinHash of 128 values estimates 0.8 with a standard error of 0.035."""
    source = random.Random(1)
    options = NearOptions()
    judge = LshIndex(options)
    originals = [text_of(source, 200) for _ in range(200)]
    for key in keys_of(options, originals):
        assert judge.add_or_reject(key) is None
    close = [edited(source, words, number % 4) for number, words in enumerate(originals)]
    far = [edited(source, words, 8) for words in originals]
    assert min(map(jaccard, originals, close)) > 0.85
    assert max(map(jaccard, originals, far)) < 0.7
    found = [judge.most_similar(key) for key in keys_of(options, close)]
    right = [pair is not None and pair[0] == number for number, pair in enumerate(found)]
    assert sum(right) >= 190
    wrong = [judge.most_similar(key) for key in keys_of(options, far)]
    assert sum(pair is not None for pair in wrong) <= 10


def test_the_estimate_is_the_similarity() -> None:
    source = random.Random(2)
    options = NearOptions(near_duplicate_threshold=0.3, num_perm=1024)
    judge = LshIndex(options)
    words = text_of(source, 300)
    other = edited(source, words, 20)
    for key in keys_of(options, [words]):
        judge.add_or_reject(key)
    found = judge.most_similar(keys_of(options, [other])[0])
    assert found is not None
    assert found[1] == pytest.approx(jaccard(words, other), abs=0.06)


def test_a_restored_judge_judges_the_same() -> None:
    source = random.Random(3)
    options = NearOptions(num_perm=64)
    texts = [text_of(source, 60) for _ in range(50)]
    keys = keys_of(options, texts)
    first, second = LshIndex(options), LshIndex(options)
    kept = [key for key in keys if first.add_or_reject(key) is None]
    for key in kept:
        second.reload(key)
    later = keys_of(options, [edited(source, words, 1) for words in texts])
    assert [first.most_similar(key) for key in later] == [second.most_similar(key) for key in later]
    assert first.add_or_reject(keys[0]) == "near duplicate"


def test_the_seed_decides_the_signature() -> None:
    words = [WORDS[:50]]
    assert keys_of(NearOptions(seed=1), words) == keys_of(NearOptions(seed=1), words)
    assert keys_of(NearOptions(seed=1), words) != keys_of(NearOptions(seed=2), words)


def test_shingles_of_words_and_of_characters() -> None:
    assert shingles("A b, c. D", 2, "words") == {"a b", "b c", "c d"}
    assert shingles("A b", 5, "words") == {"a b"}
    assert shingles("Ab \n c", 3, "characters") == {"ab ", "b c"}
    assert shingles("", 3, "characters") == {""}


@pytest.mark.parametrize(
    ("threshold", "num_perm", "bands"), [(0.8, 128, 16), (0.5, 128, 64), (0.95, 128, 8), (1, 64, 1)]
)
def test_bands_find_what_is_at_the_threshold(threshold: float, num_perm: int, bands: int) -> None:
    options = NearOptions(near_duplicate_threshold=threshold, num_perm=num_perm)
    assert options.bands == bands
    rows = num_perm // bands
    assert 1 - (1 - threshold**rows) ** bands >= 0.9


def test_many_texts_are_judged_as_by_comparing_each_with_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tables grow, with few slots at first; short signatures give bands that many texts share,
    and pairs at the threshold."""
    monkeypatch.setattr(deduplication, "BLOCK", 8)
    options = NearOptions(near_duplicate_threshold=0.5, num_perm=16)
    source = np.random.default_rng(4)
    keys = source.integers(4, size=(400, 16), dtype=np.uint16)
    judge = LshIndex(options)
    kept: list[npt.NDArray[np.uint16]] = []
    for key in keys:
        similar = [
            (float((key == other).mean()), -number)
            for number, other in enumerate(kept)
            if (key == other).reshape(options.bands, -1).all(1).any()
        ]
        best = max(similar, default=(0.0, 0))
        found = (-best[1], best[0]) if best[0] >= options.near_duplicate_threshold else None
        assert judge.most_similar(key.tobytes()) == found
        assert judge.add_or_reject(key.tobytes()) == (None if found is None else "near duplicate")
        if found is None:
            kept.append(key)
    assert 50 < len(kept) < 350


def test_a_document_needs_little_memory() -> None:
    """Signature, chains and slots of 20,000 documents: less than 0.6 KB each, also while the tables
    grow."""
    judge = LshIndex(NearOptions())
    keys = np.random.default_rng(5).integers(1 << 16, size=(20_000, 128), dtype=np.uint16)
    tracemalloc.start()
    try:
        for key in keys:
            judge.reload(key.tobytes())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 600 * len(keys)
    assert judge.most_similar(keys[-1].tobytes()) == (len(keys) - 1, 1.0)
