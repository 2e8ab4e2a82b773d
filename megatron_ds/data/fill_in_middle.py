"""Fill in the middle: documents whose middle is moved behind their prefix and suffix.

Bavarian et al. 2022 (arXiv:2207.14255), with the flags of Megatron. A sample is a function of its
tokens, the seed, the split and its position, so it does not depend on layout and resumes. Knows no
files, ranks or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from megatron_ds.config import DataConfig
from megatron_ds.config.problems import Problem, with_value
from megatron_ds.data.sample import IdArray, Mark, MarkArray, Samples
from megatron_ds.tokenizer import Tokenizer

TransformIds = Callable[[IdArray], IdArray]
ROLES = ("prefix", "suffix", "middle", "pad")


def fim_problems(options: DataConfig, tokenizer: Tokenizer) -> Iterator[Problem]:
    """Checks that the tokenizer has the tokens of the flags."""
    if not options.fim_data:
        return
    if tokenizer.token_bytes() is None:
        yield Problem("fim-needs-text")
        return
    for name in (*(f"fim_{role}_token" for role in ROLES), "fim_eod_token", "fim_split_sample"):
        token = getattr(options, name)
        if token is not None and tokenizer.token_id(token) is None:
            yield Problem("fim-token-missing", name, setting=with_value(options, name))


class FillInMiddle:
    """Transforms the samples of a split. Implements `Transform`.

    The text of a document is divided at two random characters. The tokens of the parts follow each
    other as prefix, suffix and middle or, with --fim-spm-rate, as suffix, prefix and middle. Then
    the sample is truncated to its length, or padded by tokens without loss.

    Args:
        options: The flags, for which `fim_problems` has found no problems.
        tokenizer: The run's tokenizer.
        seed: Seed of the run, and number of the split.
    """

    marks = Mark.NO_LOSS

    def __init__(self, options: DataConfig, tokenizer: Tokenizer, seed: tuple[int, int]) -> None:
        ids = [tokenizer.token_id(getattr(options, f"fim_{role}_token")) for role in ROLES]
        self._prefix, self._suffix, self._middle, self._pad = (np.array([one]) for one in ids)
        eod = options.fim_eod_token
        split = options.fim_split_sample
        self._eod = tokenizer.eod if eod is None else tokenizer.token_id(eod)
        self._split = None if split is None else tokenizer.token_id(split)
        self._rate = 0.5 if options.fim_rate is None else options.fim_rate
        self._fragment_rate = options.fim_fragment_rate or 0.0
        self._spm_rate = options.fim_spm_rate
        self._no_prefix = options.fim_no_prefix
        self._tokenizer = tokenizer
        self._seed = seed
        self._has_text = np.array(tokenizer.token_bytes()) > 0

    def __call__(self, positions: Sequence[int], samples: Samples) -> None:
        assert samples.marks is not None
        for position, ids, marks in zip(positions, samples.ids, samples.marks, strict=True):
            self._transform_sample(position, ids, marks)

    def _transform_sample(self, position: int, ids: IdArray, marks: MarkArray) -> None:
        rng = np.random.default_rng([*self._seed, position])
        moved = self._joined(ids, self._eod, lambda document: self._document(document, rng))
        size = min(len(moved), len(ids))
        ids[:size] = moved[:size]
        ids[size:] = self._pad
        marks[:size] = 0
        marks[size:] = Mark.NO_LOSS

    def _joined(self, ids: IdArray, end: int | None, transform: TransformIds) -> IdArray:
        """The ids, whose parts between the tokens `end` are transformed."""
        ends = np.flatnonzero(ids == end)
        bounds = zip([0, *(ends + 1)], [*ends, len(ids)], strict=True)
        parts = [part for a, b in bounds for part in (transform(ids[a:b]), ids[b : b + 1])]
        return np.concatenate(parts)

    def _document(self, ids: IdArray, rng: np.random.Generator) -> IdArray:
        if self._split is None or self._split not in ids:
            return self._transformed(ids, self._rate, rng)
        if rng.random() >= self._rate:
            return ids
        rate = self._fragment_rate
        return self._joined(ids, self._split, lambda part: self._transformed(part, rate, rng))

    def _transformed(self, ids: IdArray, rate: float, rng: np.random.Generator) -> IdArray:
        if not len(ids) or rng.random() >= rate:
            return ids
        tokenizer = self._tokenizer
        begin = ids[: int(ids[0] == tokenizer.bos)]
        text = tokenizer.decode(ids[self._has_text[ids]].tolist())
        if self._no_prefix is not None and text.startswith(self._no_prefix):
            return ids
        first, second = sorted(rng.integers(len(text) + 1, size=2).tolist())
        texts = text[:first], text[first:second], text[second:]
        prefix, middle, suffix = map(self._encode, texts)
        parts = [self._prefix, prefix, self._suffix, suffix, self._middle, middle]
        if rng.random() < self._spm_rate:
            parts = [self._prefix, self._suffix, suffix, self._middle, prefix, middle]
        return np.concatenate([begin, *parts])

    def _encode(self, text: str) -> IdArray:
        ids = self._tokenizer.encode(text)
        return np.array(ids[ids[:1] == [self._tokenizer.bos] :], dtype=np.int32)
