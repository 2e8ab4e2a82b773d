"""Log-probabilities of given tokens. Ids in, numbers out; knows neither tokenizers nor files.

Shapes: B texts, S tokens, N scored tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ds.inference.generation.sampling import check_finite
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.collectives import gather_objects
from megatron_ds.parallel.mesh import Mesh

Item = TypeVar("Item")
Result = TypeVar("Result")

LOGITS_TOKENS = 1024
"""Tokens whose logits are in memory together."""
BLOCK_BATCHES = 64
"""Batches for each rank whose texts are sorted by length together."""


class ScoredText(NamedTuple):
    """Ids of a text; the last ones are scored."""

    ids: Sequence[int]
    scored: int
    """Number of the last ids that are scored, less than all of them: the first has no context."""


class Score(NamedTuple):
    """Log-probability of the scored ids of a text."""

    logprob: float
    """Natural logarithm of their probability."""
    is_greedy: bool
    """Whether each of them is the most probable one."""


NOTHING = Score(0.0, is_greedy=True)
"""Score of a text without scored ids."""


@dataclass(frozen=True)
class Scorer:
    """Scores texts with a model.

    Attributes:
        model: This rank's shard, in evaluation mode.
        mesh: Data-parallel ranks share the texts.
        batch_size: Texts of a forward pass.
        in_lockstep: Whether a forward pass communicates over the data-parallel ranks, so that all
            of them must compute equally many.
        before_batch: Called before each batch, equally often on every rank.
    """

    model: GPTModel
    mesh: Mesh
    batch_size: int
    in_lockstep: bool = False
    before_batch: Callable[[], object] = bool

    def score(self, texts: Iterator[ScoredText]) -> Iterator[Score]:
        """The scores, in the order of the texts, a block of texts at a time.

        Collective: every rank passes the same texts.

        Raises:
            UserError: If the model's logits are not finite.
        """
        size = self.batch_size * self.mesh.dp.size * BLOCK_BATCHES
        while block := list(itertools.islice(texts, size)):
            yield from self._score_block(block)

    def _score_block(self, texts: Sequence[ScoredText]) -> list[Score]:
        scored = [text for text in texts if text.scored]
        scores = iter(self.share(scored, self._score_batch, lambda text: len(text.ids)))
        return [next(scores) if text.scored else NOTHING for text in texts]

    def share(
        self,
        items: Sequence[Item],
        work: Callable[[list[Item]], Sequence[Result]],
        length: Callable[[Item], int],
        *,
        passes_vary: bool = False,
    ) -> list[Result]:
        """The results of items in their order, on every rank. Collective.

        Args:
            items: The same on every rank. Items of similar length share a batch, and each
                data-parallel rank takes every DP-th of them.
            work: Computes a batch.
            length: Length of an item.
            passes_vary: Whether the number of forward passes of a batch depends on its items. Ranks
                in lockstep then compute all of them.
        """
        order = sorted(range(len(items)), key=lambda index: -length(items[index]))
        rank = self.mesh.dp.rank
        size = self.mesh.dp.size
        if self.in_lockstep and passes_vary:
            rank = 0
            size = 1
        indices = order[rank::size]
        most = len(order[::size])
        results: dict[int, Result] = {}
        for start in range(0, most, self.batch_size):
            self.before_batch()
            batch = indices[start : start + self.batch_size]
            if batch or self.in_lockstep:
                values = work([items[index] for index in batch or order[:1]])
                results |= zip(batch, values, strict=bool(batch))
        if size > 1:
            parts = gather_objects(results, self.mesh.dp)
            results = {index: result for part in parts for index, result in part.items()}
        return [results[index] for index in range(len(items))]

    @torch.no_grad()
    def _score_batch(self, texts: Sequence[ScoredText]) -> list[Score]:
        """Shorter texts are filled up at their end, which no earlier position sees."""
        device = next(self.model.parameters()).device
        longest = max(len(text.ids) for text in texts) - 1
        tokens_BS = torch.zeros(len(texts), longest, dtype=torch.long)
        positions = []
        targets = []
        for row, (ids, scored) in enumerate(texts):
            end = len(ids) - 1
            tokens_BS[row, :end] = torch.tensor(ids[:-1])
            positions.append(torch.arange(end - scored, end) * len(texts) + row)
            targets.append(torch.tensor(ids[len(ids) - scored :]))
        x_SBH = self.model.hidden(tokens_BS.to(device))
        positions_N, targets_N = (torch.cat(pieces).to(device) for pieces in (positions, targets))
        x_NH = x_SBH.flatten(0, 1)[positions_N]
        pairs = zip(x_NH.split(LOGITS_TOKENS), targets_N.split(LOGITS_TOKENS), strict=True)
        chunks = list(pairs)
        most = self._most_of_all_ranks(len(chunks))
        parts = [self._score_tokens(*chunk) for chunk in chunks]
        for _ in range(most - len(parts)):
            self._score_tokens(x_NH[:1], targets_N[:1])  # for the other ranks
        logprobs_N, is_greedy_N = (torch.cat(pieces).cpu() for pieces in zip(*parts, strict=True))
        check_finite(logprobs_N.tolist())
        sizes = [text.scored for text in texts]
        rows = zip(logprobs_N.double().split(sizes), is_greedy_N.split(sizes), strict=True)
        return [Score(float(logprobs.sum()), bool(greedy.all())) for logprobs, greedy in rows]

    def _most_of_all_ranks(self, count: int) -> int:
        """The largest number of the data-parallel ranks in lockstep."""
        if not self.in_lockstep or self.mesh.dp.size == 1:
            return count
        largest = torch.tensor(count, device=next(self.model.parameters()).device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.mesh.dp.handle)
        return int(largest)

    def _score_tokens(self, x_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability of each token, and whether it is the most probable one."""
        logits_NV = self.model.logits(x_NH[:, None])[0]
        chosen_N = logits_NV.gather(-1, targets_N[:, None])[:, 0]
        return chosen_N - logits_NV.logsumexp(dim=-1), logits_NV.argmax(dim=-1) == targets_N


def windows(ids: Sequence[int], length: int, stride: int) -> Iterator[ScoredText]:
    """Splits a long text into windows in which each id but the first is scored once.

    Windows begin every `stride` tokens. The first one scores all of its tokens, each later one the
    next `stride` ones, after `length - stride` others. As with `--overlapping-eval` in Megatron-LM.

    Args:
        ids: The text.
        length: Largest number of tokens that the model reads at a time.
        stride: Tokens between the beginnings of windows, from 1 to `length`, at which windows do
            not overlap.
    """
    done = 0
    while done < len(ids) - 1:
        begin = done + stride - length if done else 0
        end = min(begin + length, len(ids) - 1)
        yield ScoredText(ids[begin : end + 1], end - done)
        done = end
