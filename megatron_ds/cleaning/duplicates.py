"""The stages `exact` and `near`: documents that were there before.

The first of several stays. Near duplicates are found by MinHash (Broder, 1997) with banding, as Lee
et al. (2021, "Deduplicating Training Data Makes Language Models Better") do it, through rensa.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.cleaning.journey import MISSING_EXTRA, Claimed, Document

HASH_BYTES = 16
WORD = re.compile(r"\w+")
UNITS = ("words", "characters")
BLOCK = 1 << 12
"""Signatures that are kept in one array."""
MIN_RECALL = 0.9
"""Pairs just as similar as the threshold share a band with at least this probability."""


class Exact:
    """Claims a text's hash: of its letters without their case, each run of spaces as one space."""

    name = "exact"

    def __call__(self, document: Document) -> Claimed:
        text = " ".join(document.text.casefold().split())
        # No text has halves of surrogate pairs; what a lone pass may leave must not stop a run.
        data = text.encode("utf-8", "surrogatepass")
        return Claimed(blake2b(data, digest_size=HASH_BYTES).digest())


class ExactJudge:
    """The hashes so far."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def claim(self, key: bytes) -> str | None:
        if key in self._seen:
            return "exact duplicate"
        self._seen.add(key)
        return None

    def restore(self, key: bytes) -> None:
        self._seen.add(key)


@dataclass(frozen=True)
class NearOptions:
    """threshold: the Jaccard similarity of two texts' shingles from which the later one is dropped.
    num_perm: values of a signature. ngram: units of a shingle. unit: one of UNITS.
    """

    threshold: float = 0.8
    num_perm: int = 128
    ngram: int = 5
    unit: str = "words"
    seed: int = 1234

    @property
    def bands(self) -> int:
        """The fewest equal parts of a signature that find pairs at the threshold with MIN_RECALL.

        Two texts of similarity s agree in a band of r values with probability s^r, and in one of b
        bands with 1 - (1 - s^r)^b.
        """
        for bands in range(1, self.num_perm + 1):
            if self.num_perm % bands == 0:
                rows = self.num_perm // bands
                if 1 - (1 - self.threshold**rows) ** bands >= MIN_RECALL:
                    return bands
        return self.num_perm


class Near:
    """Claims a text's MinHash signature. Raises ValueError where rensa is missing."""

    name = "near"

    def __init__(self, options: NearOptions) -> None:
        self._options = options
        self._rensa = _rensa()

    def __call__(self, document: Document) -> Claimed:
        signature = self._rensa.RMinHash(self._options.num_perm, self._options.seed)
        signature.update(shingles(document.text, self._options.ngram, self._options.unit))
        # What rensa pickles of a signature: it names its version, and comes back as it was.
        return Claimed(signature.__getstate__())


class NearJudge:
    """The signatures so far: rensa's index of their bands, and their values.

    What shares a band is a candidate; the share of equal values estimates its similarity. Memory is
    about 1.5 KB for the bands of a document and 4 * num_perm bytes for its values.
    """

    def __init__(self, options: NearOptions) -> None:
        self._options = options
        self._rensa = _rensa()
        self._index = self._rensa.RMinHashLSH(options.threshold, options.num_perm, options.bands)
        self._blocks: list[npt.NDArray[np.uint32]] = []
        self._count = 0

    def claim(self, key: bytes) -> str | None:
        if self.most_similar(key) is not None:
            return "near duplicate"
        self.restore(key)
        return None

    def most_similar(self, key: bytes) -> tuple[int, float] | None:
        """The number of the kept document that is most similar, the first of them, and how similar
        it is; None if none reaches the threshold."""
        signature = self._signature(key)
        candidates = sorted(self._index.query(signature))
        if not candidates:
            return None
        values = np.asarray(signature.digest(), np.uint32)
        rows = np.stack([self._blocks[number // BLOCK][number % BLOCK] for number in candidates])
        similarity = (rows == values).mean(axis=1)
        best = int(similarity.argmax())
        if similarity[best] < self._options.threshold:
            return None
        return candidates[best], float(similarity[best])

    def restore(self, key: bytes) -> None:
        signature = self._signature(key)
        if self._count % BLOCK == 0:
            self._blocks.append(np.empty((BLOCK, self._options.num_perm), np.uint32))
        self._blocks[-1][self._count % BLOCK] = signature.digest()
        self._index.insert(self._count, signature)
        self._count += 1

    def _signature(self, key: bytes) -> Any:
        signature = self._rensa.RMinHash(self._options.num_perm, self._options.seed)
        signature.__setstate__(key)
        return signature


def shingles(text: str, ngram: int, unit: str) -> set[str]:
    """The runs of `ngram` words, or characters, of a text in lower case; of a shorter one, itself.

    Between words only what is no letter or digit is passed over; spaces count as one.
    """
    text = text.casefold()
    if unit == "words":
        words = WORD.findall(text)
        runs = range(max(1, len(words) - ngram + 1))
        return {" ".join(words[at : at + ngram]) for at in runs}
    text = " ".join(text.split())
    return {text[at : at + ngram] for at in range(max(1, len(text) - ngram + 1))}


def _rensa() -> Any:
    try:
        import rensa
    except ImportError:
        raise ValueError(f"--stages near: needs rensa: {MISSING_EXTRA}") from None
    return rensa
