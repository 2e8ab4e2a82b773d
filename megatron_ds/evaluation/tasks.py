"""Tasks of an evaluation: perplexity of texts, and the cloze test LAMBADA. Knows no model.

Tasks and flags are as in Megatron-LM's `tasks/main.py` (WIKITEXT103, LAMBADA), the latter as in
Paperno et al. 2016 (arXiv:1606.06031), and bits per byte as in Gao et al. 2020 (arXiv:2101.00027).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron_ds.config.options.evaluation import FILE_TASKS
from megatron_ds.config.problems import user_error
from megatron_ds.tokenizer import Tokenizer

if TYPE_CHECKING:  # which imports torch
    from megatron_ds.evaluation.scoring import Score, ScoredText

TASKS = FILE_TASKS
PERPLEXITY, WIKITEXT, LAMBADA = FILE_TASKS

PUNCTUATION = (
    ("s '", "s'"),
    *((f" @{sign}@ ", sign) for sign in "-,."),
    *((f" {sign} ", f"{sign} ") for sign in ":;.!?,"),
)
BRACKETS = (("(", ")"), ("[", "]"), ("{", "}"), ('"', '"'), ("'", "'"))
OTHERS = (
    *((" ".join("=" * count), "=" * count) for count in (4, 3, 2)),
    (" \u00b0", "\u00b0"),
    (" \n", "\n"),
    ("\n ", "\n"),
    (" N ", " 1 "),
    (" 's", "'s"),
)
"""Spellings of WikiText with the original ones, in the order of the published evaluations of
GPT-2 and Megatron-LM. Their perplexities are per word of WikiText."""


class Text(NamedTuple):
    """A text to evaluate, as text or as the ids of a token file."""

    content: str
    ids: list[int] | None = None


@dataclass
class Totals:
    """Sums over all texts."""

    documents: int = 0
    tokens: int = 0
    """Scored tokens."""
    words: int = 0
    num_bytes: int = 0
    nats: float = 0.0
    """Negative logarithm of the probability of all scored tokens."""
    correct: int = 0
    """Texts whose scored tokens are all the most probable ones."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class Task:
    """A task on some texts.

    Attributes:
        name: One of `TASKS`.
        tokenizer: The model's.
        length: Largest number of tokens that the model reads at a time.
        stride: See `windows`.
        is_strict: Whether LAMBADA's last word is encoded on its own.
    """

    name: str
    tokenizer: Tokenizer
    length: int
    stride: int
    is_strict: bool = False

    def requests(self, texts: Iterator[Text], totals: Totals) -> Iterator[ScoredText]:
        """The requests to the model; counts the texts.

        Raises:
            UserError: If a text has no word to predict.
        """
        for text in texts:
            totals.documents += 1
            requests = self._cloze(text, totals) if self.name == LAMBADA else self._rolling(text)
            content = text.content.strip()
            # WikiText's words have single spaces between them, and its line ends are words.
            words = content.split(" ") if self.name == WIKITEXT else content.split()
            totals.words += len(words)
            totals.num_bytes += len(text.content.encode())
            for request in requests:
                totals.tokens += request.scored
                yield request

    def evaluate(
        self, texts: Iterator[Text], score: Callable[[Iterator[ScoredText]], Iterator[Score]]
    ) -> Totals:
        """Sums over all texts.

        Raises:
            UserError: If there is no text, or one has no word to predict.
        """
        totals = Totals()
        for result in score(self.requests(texts, totals)):
            totals.nats -= result.logprob
            totals.correct += result.is_greedy
        if not totals.tokens:
            raise user_error("nothing-to-score")
        return totals

    def _rolling(self, text: Text) -> Iterator[ScoredText]:
        """Windows of a text. Only WikiText's first token has no context, as in Megatron-LM, unless
        the tokenizer begins texts with a token."""
        from megatron_ds.evaluation.scoring import windows

        if self.name == WIKITEXT:
            ids = self._encode(without_wikitext_spaces(text.content))
        else:
            ids = text.ids or self.tokenizer.encode(text.content)
            if ids[:1] != [self.tokenizer.bos]:
                ids = [self.tokenizer.prefix, *ids]
        return windows(ids, self.length, self.stride)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.begin(self.tokenizer.encode(text))

    def _cloze(self, text: Text, totals: Totals) -> Iterator[ScoredText]:
        from megatron_ds.evaluation.scoring import ScoredText

        words = text.content.split()
        ids = self._encode(text.content.rstrip())
        scored = 1
        if self.is_strict and words:
            start = text.content.rstrip().removesuffix(words[-1]).rstrip()
            last = self.tokenizer.encode(f" {words[-1]}")
            ids = [*self._encode(start), *last]
            scored = len(last)
        if len(words) < 2 or scored >= len(ids):
            raise user_error("cloze-without-context", number=totals.documents)
        yield ScoredText(ids[-(self.length + 1) :], scored)

    def figures(self, totals: Totals) -> dict[str, float | int | str]:
        """The results by name."""
        loss = totals.nats / totals.tokens
        counts = {"documents": totals.documents, "tokens": totals.tokens}
        if self.name == LAMBADA:
            accuracy = totals.correct / totals.documents
            return {"task": self.name, **counts, "accuracy": accuracy, "loss": loss}
        # The first token and the first word are not predicted.
        words = totals.words - (self.name == WIKITEXT and not self.tokenizer.adds_bos)
        return {
            "task": self.name,
            **counts,
            "words": totals.words,
            "bytes": totals.num_bytes,
            "loss": loss,
            "perplexity": _exp(loss),
            "word_perplexity": _exp(totals.nats / max(1, words)),
            "bits_per_byte": totals.nats / math.log(2) / max(1, totals.num_bytes),
        }


def format_of(task: str) -> str:
    """The format of a task's files, as in `InputSpec`: WikiText's have a suffix of their own."""
    return "text" if task == WIKITEXT else "auto"


def without_wikitext_spaces(text: str) -> str:
    """The text as it was before WikiText separated punctuation from words."""
    for old, new in PUNCTUATION:
        text = text.replace(old, new)
    for first, last in BRACKETS:
        left = re.escape(first)
        right = re.escape(last)
        text = re.sub(rf"{left}\s*([^{right}]*?)\s*{right}", rf"{first}\1{last}", text)
    for old, new in OTHERS:
        text = text.replace(old, new)
    return text


def _exp(nats: float) -> float:
    """The exponential; infinity where it has no floating-point number."""
    return math.exp(nats) if nats < 700 else math.inf
