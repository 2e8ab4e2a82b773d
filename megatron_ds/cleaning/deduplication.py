"""The stages `exact` and `near`: drop duplicates of earlier documents.

The first of several duplicates is kept. Near duplicates are found by MinHash (Broder, 1997) with
banded locality-sensitive hashing (LSH), as in Lee et al. (2021, "Deduplicating Training Data Makes
Language Models Better"), with signatures by rensa.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from hashlib import blake2b
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron_ds.cleaning.stages import Document, NeedsUniqueKey
from megatron_ds.config.checks import import_library
from megatron_ds.config.fields import option_field
from megatron_ds.config.problems import option

HASH_BYTES = 16
WORD = re.compile(r"\w+")
UNITS = ("words", "characters")
VALUE = np.dtype("<u2")
"""Storage type of the values of a signature, in memory and in files."""
BLOCK = 1 << 10
"""Documents that are inserted together when the tables grow."""
MIN_RECALL = 0.9
"""Minimum probability that two documents at the threshold share a band."""


class ExactHash:
    """Requests a unique hash of the text in lower case, with whitespace collapsed."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = {}

    def __call__(self, document: Document) -> NeedsUniqueKey:
        text = " ".join(document.text.casefold().split())
        # Parsing rejects lone surrogates; one that a stage leaves must not stop the run.
        data = text.encode("utf-8", "surrogatepass")
        return NeedsUniqueKey(blake2b(data, digest_size=HASH_BYTES).digest())


class SeenHashes:
    """Hashes of the kept documents."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add_or_reject(self, key: bytes) -> str | None:
        if key in self._seen:
            return "exact duplicate"
        self._seen.add(key)
        return None

    def reload(self, key: bytes) -> None:
        self._seen.add(key)


@dataclass(frozen=True)
class NearOptions:
    """Near duplicates (stage near), found by MinHash signatures."""

    near_duplicate_threshold: float = option_field(0.8, above=0, maximum=1, metavar="J")
    """Drop documents whose n-grams have at least this Jaccard similarity with those of an earlier
    document, as estimated by MinHash."""
    num_perm: int = option_field(128, minimum=16, maximum=4096)
    """Number of MinHash values per document; more improve the estimate and need more memory."""
    near_ngram_size: int = option_field(5, minimum=1)
    """Length of n-grams."""
    near_ngram_unit: str = option_field("words", choices=UNITS)
    """Unit of n-grams; use characters for text without spaces."""
    seed: int = option_field(1234, minimum=0, below=1 << 64)
    """Seed of the hash functions."""

    @property
    def bands(self) -> int:
        """The fewest equal parts of a signature that find pairs at the threshold with MIN_RECALL.

        Two texts of similarity s agree in a band of r values with probability s^r, and in one of b
        bands with 1 - (1 - s^r)^b.
        """
        for bands in range(1, self.num_perm):
            rows, rest = divmod(self.num_perm, bands)
            recall = 1 - (1 - self.near_duplicate_threshold**rows) ** bands
            if rest == 0 and recall >= MIN_RECALL:
                return bands
        return self.num_perm


class MinHashSignature:
    """Requests a unique MinHash signature.

    Only the last 16 bits of each value are kept, so that different values are taken for equal once
    in 65,536 (b-bit minwise hashing; Li and König, 2010).

    Raises:
        UserError: If rensa is not installed.
    """

    def __init__(self, options: NearOptions) -> None:
        self._options = options
        self._minhash = import_library("rensa", f"{option('stages')} near", "stages").RMinHash
        self.settings = {**vars(options), "version of rensa": version("rensa")}

    def __call__(self, document: Document) -> NeedsUniqueKey:
        options = self._options
        signature = self._minhash(options.num_perm, options.seed)
        signature.update(shingles(document.text, options.near_ngram_size, options.near_ngram_unit))
        return NeedsUniqueKey(np.array(signature.digest(), np.uint32).astype(VALUE).tobytes())


class LshIndex:
    """Signatures of the kept documents, with a hash table per band (LSH).

    Documents that share a band are candidates; the fraction of equal values estimates their
    similarity. A document needs 2 * num_perm bytes for its values and 8 to 12 per band, plus up to
    an eighth for growth: 600 bytes by default, where the index of rensa needs 2,100.
    """

    def __init__(self, options: NearOptions) -> None:
        self._options = options
        self._bands = options.bands
        self._rows = options.num_perm // options.bands
        self._columns = np.arange(self._bands)
        odd = np.random.default_rng(options.seed).integers(1 << 63, size=self._rows + 1)
        *factors, self._mixer = odd.astype(np.uint64) * np.uint64(2) + np.uint64(1)
        self._factors = np.array(factors)
        self._count = 0
        self._signatures = np.empty((0, options.num_perm), VALUE)
        # Documents whose band hashes to the same slot form a chain: each entry is the number of the
        # previous document plus one, or 0 at the end. A slot holds the last document of its chain.
        self._earlier = np.empty((0, self._bands), np.uint32)
        self._last = np.zeros((self._bands, BLOCK), np.uint32)

    def add_or_reject(self, key: bytes) -> str | None:
        values, slots = self._place(key)
        if self._nearest(values, slots) is not None:
            return "near duplicate"
        self._keep(values, slots)
        return None

    def most_similar(self, key: bytes) -> tuple[int, float] | None:
        """Returns the number and similarity of the most similar kept document, the first one on a
        tie; None if no document reaches the threshold."""
        return self._nearest(*self._place(key))

    def reload(self, key: bytes) -> None:
        self._keep(*self._place(key))

    def _place(self, key: bytes) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.intp]]:
        """Values of a signature and the slot of each band. Makes room before, which moves slots."""
        if self._count == len(self._signatures):
            self._grow()
        values = np.frombuffer(key, VALUE)
        return values, self._slots(values)[0]

    def _nearest(
        self, values: npt.NDArray[np.uint16], slots: npt.NDArray[np.intp]
    ) -> tuple[int, float] | None:
        chained = self._chained(slots)
        if not chained.size:
            return None
        equal = self._signatures[chained] == values
        # Different bands may hash to the same slot.
        share_a_band = equal.reshape(-1, self._bands, self._rows).all(2).any(1)
        similarity = np.where(share_a_band, equal.mean(1), -1)
        best = int(similarity.argmax())
        if similarity[best] < self._options.near_duplicate_threshold:
            return None
        return int(chained[best]), float(similarity[best])

    def _keep(self, values: npt.NDArray[np.uint16], slots: npt.NDArray[np.intp]) -> None:
        self._signatures[self._count] = values
        self._earlier[self._count] = self._last[self._columns, slots]
        self._count += 1
        self._last[self._columns, slots] = self._count

    def _chained(self, slots: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Sorted numbers of the documents in one slot per band."""
        candidates = [np.empty(0, np.intp)]
        bands = self._columns
        numbers = self._last[self._columns, slots]
        while numbers.any():
            there = numbers > 0
            bands = bands[there]
            before = numbers[there].astype(np.intp) - 1
            candidates.append(before)
            numbers = self._earlier[before, bands]
        return np.unique(np.concatenate(candidates)) if len(candidates) > 1 else candidates[0]

    def _slots(self, signatures: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp]:
        """Slot of each band, by multiplicative hashing: [signatures, bands]."""
        values = signatures.reshape(-1, self._bands, self._rows).astype(np.uint64)
        mixed = (values * self._factors).sum(2, dtype=np.uint64)
        mixed = (mixed ^ (mixed >> np.uint64(32))) * self._mixer
        bits = self._last.shape[1].bit_length() - 1
        slots: npt.NDArray[np.intp] = (mixed >> np.uint64(64 - bits)).astype(np.intp)
        return slots

    def _enter(self, begin: int, end: int) -> None:
        """Append many documents to their chains at once."""
        slots = self._slots(self._signatures[begin:end])
        for band, of_band in enumerate(slots.T):
            order = np.argsort(of_band, kind="stable")
            ranked = of_band[order]
            starts = np.r_[True, ranked[1:] != ranked[:-1]]
            earlier = np.empty(len(order), np.uint32)
            earlier[1:] = order[:-1] + begin + 1
            earlier[starts] = self._last[band, ranked[starts]]
            self._earlier[begin + order, band] = earlier
            ends = np.r_[starts[1:], True]
            self._last[band, ranked[ends]] = order[ends] + begin + 1

    def _grow(self) -> None:
        """Make room for an eighth more documents, without a copy if the system can remap pages, and
        double the slots if there are more documents than slots."""
        rows = self._count + max(BLOCK, self._count // 8)
        self._signatures.resize((rows, self._options.num_perm), refcheck=False)
        self._earlier.resize((rows, self._bands), refcheck=False)
        slots = self._last.shape[1]
        if rows <= slots:
            return
        del self._last  # before the new table is allocated
        self._last = np.zeros((self._bands, 2 * slots), np.uint32)
        for begin in range(0, self._count, BLOCK):
            self._enter(begin, min(begin + BLOCK, self._count))


def shingles(text: str, ngram: int, unit: str) -> set[str]:
    """The n-grams of words or characters of a text in lower case; of a shorter text, the text.

    Punctuation between words is ignored, and whitespace between characters collapsed. A text
    without words, such as one of emoji, has n-grams of characters.
    """
    text = text.casefold()
    if unit == "words" and (words := WORD.findall(text)):
        runs = range(max(1, len(words) - ngram + 1))
        return {" ".join(words[at : at + ngram]) for at in runs}
    text = " ".join(text.split())
    return {text[at : at + ngram] for at in range(max(1, len(text) - ngram + 1))}
