"""Continuous batching: sequences join and leave a batch between two tokens. Ids in, ids out.

Must not know tokenizers, checkpoints or process groups. As in Orca (Yu et al. 2022), each step
computes one token of every running sequence, whatever their lengths. A prompt is first fed to the
cache except for its last token, several of them in one pass; the last token of each running
sequence is fed in the step that chooses the next one.

Shapes: B sequences, S tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from megatron_ds.config.devices import is_host
from megatron_ds.config.problems import user_error
from megatron_ds.inference.generation.decoding import DecodeGraphs, Decoder
from megatron_ds.inference.generation.device_inputs import to_device
from megatron_ds.inference.generation.kv_cache import PreallocatedCache
from megatron_ds.inference.generation.sampling import choose, exclude_
from megatron_ds.inference.generation.sequences import TextSequence
from megatron_ds.model.attention.cores import VARYING_SIZES, backends_in_order
from megatron_ds.model.gpt import GPTModel

PROMPT_TOKENS = 512
"""Tokens of prompts in a step; while they are computed, the running sequences wait."""
SCORED_TOKENS = 128
"""Tokens of a prompt whose logits are in memory together."""
MIN_SHARED_TOKENS = 16
"""Tokens that a prompt must share with another one for keys and values to be copied."""


class GenerationEngine:
    """Continues sequences. Collective on tensor-parallel ranks, with equal calls.

    Attributes:
        running: Sequences in the batch.
        waiting: Sequences that wait for a place in it.
    """

    def __init__(
        self,
        model: GPTModel,
        *,
        slots: int,
        capacity: int,
        use_cache: bool = True,
        use_graphs: bool = False,
    ) -> None:
        """
        Args:
            model: This rank's shard of the model, in evaluation mode.
            slots: Number of sequences that run at the same time.
            capacity: Number of tokens of a sequence.
            use_cache: Keep keys and values; otherwise every token recomputes all tokens.
            use_graphs: Record and replay the layers of a token, on one rank, if the device can.
        """
        self.running: list[TextSequence] = []
        self.waiting: deque[TextSequence] = deque()
        self._model = model
        weight = next(model.parameters())
        self._device = weight.device
        # Inference mode takes a tenth off a token of a small model on a CPU. Not every device's
        # views support it, and parameters that ZeRO-3 gathers in it cannot be trained afterwards.
        is_trained = any(parameter.requires_grad for parameter in model.parameters())
        has_inference_mode = is_host(weight.device.type) and not is_trained
        self._without_gradients = torch.inference_mode if has_inference_mode else torch.no_grad
        self._use_cache = use_cache
        windows = [block.rule.window for block in model.blocks()]
        self._cache = PreallocatedCache(slots, capacity, weight, windows, has_spare=use_graphs)
        cache = self._cache
        self._decoder = Decoder(model, cache, DecodeGraphs(model, cache) if use_graphs else None)
        self._partial: TextSequence | None = None
        """Prompt being prefilled in chunks; occupies the slot after the running sequences."""

    @property
    def is_busy(self) -> bool:
        return bool(self.running or self.waiting or self._partial)

    @property
    def free_slots(self) -> int:
        return self._cache.slots - len(self.running)

    def add(self, sequence: TextSequence) -> None:
        """Adds a sequence, which starts when there is a place."""
        self.waiting.append(sequence)

    def remove(self, sequences: Iterable[TextSequence]) -> None:
        """Removes sequences that are no longer wanted; the ones that have ended are ignored."""
        unwanted = set(map(id, sequences))
        self.waiting = deque(sequence for sequence in self.waiting if id(sequence) not in unwanted)
        if id(self._partial) in unwanted:
            self._partial = None
        with self._without_gradients():
            self._drop([sequence for sequence in self.running if id(sequence) in unwanted])

    def step(self) -> list[TextSequence]:
        """Feeds waiting prompts, and chooses a token for each running sequence.

        Returns:
            The sequences with a new token and those that are done.
        """
        with self._without_gradients(), backends_in_order(VARYING_SIZES, self._device):
            changed = self._start_waiting()
            if self.running:
                changed += self.running
                self._extend(self.running)
                self._drop([sequence for sequence in self.running if sequence.is_done])
        return changed

    def _start_waiting(self) -> list[TextSequence]:
        """Moves waiting sequences to the running ones, within the limit of tokens of a step.

        Returns:
            Those that are done without new tokens.
        """
        budget = PROMPT_TOKENS
        done = list[TextSequence]()
        while budget > 0:
            if (sequence := self._partial) is not None:
                budget -= max(1, self._feed_partial(sequence, budget))
                if self._partial is None and sequence.is_done:
                    done.append(sequence)
                    self._drop([sequence])
            elif batch := self._next_batch(budget):
                budget -= max(1, self._feed_batch(batch))
            elif self._partial is None:
                break
        return done

    def _next_batch(self, budget: int) -> list[TextSequence]:
        """Prompts that one pass feeds. What is fed alone becomes the partial one."""
        batch: list[TextSequence] = []
        longest = 0
        while self.waiting and len(self.running) + len(batch) < self._cache.slots:
            sequence = self.waiting[0]
            fed = len(sequence.ids) - 1
            is_scored = sequence.config.prompt_logprobs
            shared = 0
            source = 0
            if self._use_cache and not is_scored:  # a running prompt may have computed its start
                shared, source = _best_prefix(sequence, [*self.running, *batch])
                shared = shared if self._cache.can_copy(source, shared) else 0
            if shared or is_scored or (self._use_cache and fed >= PROMPT_TOKENS):
                if not batch:
                    self._partial = self.waiting.popleft()
                    self._cache.copy(source, len(self.running), shared)
                break
            longest = max(longest, fed)
            if batch and (len(batch) + 1) * longest > budget:
                break
            batch.append(self.waiting.popleft())
        return batch

    def _feed_partial(self, sequence: TextSequence, budget: int) -> int:
        """Feeds the next tokens of the partial prompt; returns how many."""
        slot = len(self.running)
        scored = sequence.config.prompt_logprobs
        start = self._cache.lengths[slot]
        last = len(sequence.ids) - 1
        end = min(last, start + (SCORED_TOKENS if scored else budget))
        if end > start:
            x_SBH = self._feed(slot, [sequence.ids[start:end]])
            if scored:
                following = sequence.ids[start + 1 : end + 1]
                logits_SV = self._model.logits(x_SBH[: len(following)])[0]
                self._add_scores([sequence] * len(following), logits_SV, following)
        if end == last or sequence.error is not None:
            self._partial = None
            self.running.append(sequence)
        return end - start

    def _feed_batch(self, batch: list[TextSequence]) -> int:
        """Feeds prompts except for their last tokens; returns the number of tokens of the pass.

        Shorter prompts are filled up at their end, which no earlier position sees.
        """
        first = len(self.running)
        lengths = [len(sequence.ids) - 1 for sequence in batch]
        longest = max(lengths) if self._use_cache else 0
        if self._use_cache:
            self._cache.lengths[first : first + len(batch)] = [0] * len(batch)
        if longest:
            self._feed(first, [sequence.ids[:-1] for sequence in batch])
        self.running += batch
        return longest * len(batch)

    def _feed(self, first: int, parts: Sequence[Sequence[int]]) -> Tensor:
        """Feeds parts of prompts to consecutive slots: the last layer's output [S, B, H].

        A pass has at least two tokens, because one may be rounded differently (`kv_cache`).
        """
        tokens_BS = self._filled_up(parts)
        if tokens_BS.shape[1] == 1:
            tokens_BS = nn.functional.pad(tokens_BS, (0, 1))
        view = self._cache.view(first, [len(part) for part in parts], tokens_BS.shape[1])
        return self._model.hidden(tokens_BS, view)

    def _extend(self, sequences: list[TextSequence]) -> None:
        """Appends a token to each of all running sequences."""
        logits_BV = self._model.logits(self._last_hidden(sequences))[:, 0]
        scored = [row for row, sequence in enumerate(sequences) if sequence.config.logprobs]
        raw_BV = logits_BV[to_device(scored, self._device)] if scored else None
        rules = ((sequence.config.rules, sequence.ids[-1]) for sequence in sequences)
        exclude_(logits_BV, (rule.forbidden(last) if rule else () for rule, last in rules))
        self._decoder.keep(sequences, _sample(sequences, logits_BV))
        if raw_BV is not None:
            scored_sequences = [sequences[row] for row in scored]
            self._add_scores(
                scored_sequences, raw_BV, [sequence.ids[-1] for sequence in scored_sequences]
            )

    def _last_hidden(self, sequences: list[TextSequence]) -> Tensor:
        """The last layer's output at the last token of each sequence, [1, B, H]."""
        if self._use_cache:
            return self._decoder.last_hidden(sequences)
        x_SBH = self._model.hidden(self._filled_up([text.ids for text in sequences]))
        last_B = to_device([len(sequence.ids) - 1 for sequence in sequences], self._device)
        rows_B = torch.arange(len(sequences), device=self._device)
        return x_SBH[last_B, rows_B].unsqueeze(0)  # type: ignore[no-any-return]

    def _filled_up(self, rows: Sequence[Sequence[int]]) -> Tensor:
        """Ids [B, S], shorter rows with zeros at their end."""
        longest = max(map(len, rows))
        return to_device([[*row, *[0] * (longest - len(row))] for row in rows], self._device)

    def _drop(self, sequences: Sequence[TextSequence]) -> None:
        """Removes running sequences; the last ones take their slots."""
        for sequence in sequences:
            slot = self.running.index(sequence)
            last = len(self.running) - 1
            if sequence.error is not None:
                self._cache.clear(slot)
            self.running[slot] = self.running[last]
            del self.running[last]
            if slot < last:
                self._cache.copy(last, slot)
            if self._partial is not None:
                self._cache.copy(last + 1, last)

    def _add_scores(
        self, sequences: Sequence[TextSequence], logits_BV: Tensor, ids: Sequence[int]
    ) -> None:
        """Adds to each sequence the scores of a token, in this order."""
        logprobs_BV = logits_BV.float().log_softmax(dim=-1)
        tokens_B = to_device(ids, logits_BV.device)
        chosen = logprobs_BV.gather(-1, tokens_B[:, None])[:, 0].tolist()
        top_n = max(sequence.config.top_n for sequence in sequences)
        values_Bn, tokens_Bn = logprobs_BV.topk(min(top_n, self._model.config.vocab_size), dim=-1)
        tops = zip(tokens_Bn.tolist(), values_Bn.tolist(), strict=True)
        for sequence, logprob, (numbers, values) in zip(sequences, chosen, tops, strict=True):
            if not math.isfinite(logprob):
                sequence.error = user_error("logits-not-finite")
            sequence.scores.logprobs.append(logprob)
            count = sequence.config.top_n
            sequence.scores.top.append(list(zip(numbers[:count], values[:count], strict=True)))


def _best_prefix(sequence: TextSequence, others: Sequence[TextSequence]) -> tuple[int, int]:
    """The most tokens that a prompt shares with the fed ones of another prompt, and its number.

    New tokens are not shared, because a pass of one token may round differently. 0, if copying them
    is not worth a pass of its own for the remainder.
    """
    fed = sequence.ids[:-1]
    best = max(
        (
            (_shared(fed, other.ids[: other.prompt_length - 1]), row)
            for row, other in enumerate(others)
        ),
        default=(0, 0),
    )
    return best if best[0] >= max(MIN_SHARED_TOKENS, len(fed) // 2) else (0, 0)


def _shared(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return next((index for index, (one, other) in pairs if one != other), shorter)


def _sample(sequences: Sequence[TextSequence], logits_BV: Tensor) -> Tensor:
    """Appends a token to each sequence; those with equal parameters are sampled together.

    Returns:
        The ids [B] on the device. One of a sequence with an error is arbitrary.
    """
    params_by_row = [
        text.config.sampling.after(len(text.ids) - text.prompt_length) for text in sequences
    ]
    rows_by_params: dict[tuple[float, ...], list[int]] = {}
    for row, params in enumerate(params_by_row):
        # All but the seed, which is in the row's key.
        key = (params.greedy, params.temperature, params.top_k, params.top_p)
        rows_by_params.setdefault(key, []).append(row)
    parts = list[Tensor]()
    order = list[int]()
    for rows in rows_by_params.values():
        is_all = len(rows) == len(sequences)
        part_BV = logits_BV if is_all else logits_BV[to_device(rows, logits_BV.device)]
        keys = [sequences[row].noise_key for row in rows]
        # fp32 holds the ids of any vocabulary exactly.
        parts.append(torch.stack(choose(part_BV, params_by_row[rows[0]], keys)))
        order += rows
    chosen_2B = parts[0]
    if len(parts) > 1:
        places = sorted(range(len(order)), key=order.__getitem__)
        chosen_2B = torch.cat(parts, dim=1)[:, to_device(places, logits_BV.device)]
    # The one wait for the device, besides top-p's.
    for sequence, token, value in zip(sequences, *chosen_2B.tolist(), strict=True):
        if math.isfinite(value):
            sequence.append(int(token))
        else:
            sequence.error = user_error("logits-not-finite")
    return chosen_2B[0].long()
