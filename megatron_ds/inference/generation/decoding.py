"""The step that computes one token of each running text.

The chosen ids stay on the device for the next step. Where a device can replay recorded kernels, the
layers of a step may be one such graph for each number of texts and of keys, both rounded up.

Shapes: B texts, H hidden.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ds.config.problems import Problem
from megatron_ds.inference.generation.device_inputs import to_device
from megatron_ds.inference.generation.kv_cache import CacheView, PreallocatedCache
from megatron_ds.inference.generation.sequences import TextSequence
from megatron_ds.model.gpt import GPTModel

TOLERANCE = 1e-2
"""Largest accepted difference of a graph's first result, relative to the norm."""


class Decoder:
    """Feeds the last token of each running text.

    Args:
        model: This rank's shard of the model.
        cache: Its keys and values; the running texts have the first slots.
        graphs: Records and replays the layers. None: they are computed eagerly.
    """

    def __init__(
        self, model: GPTModel, cache: PreallocatedCache, graphs: DecodeGraphs | None
    ) -> None:
        self._model = model
        self._cache = cache
        self._graphs = graphs
        self._sequences: list[TextSequence] = []
        self._ids_B = torch.empty(0)

    def keep(self, sequences: Sequence[TextSequence], ids_B: Tensor) -> None:
        """Keeps the last ids of these texts on the device."""
        self._sequences = list(sequences)
        self._ids_B = ids_B

    def last_hidden(self, sequences: Sequence[TextSequence]) -> Tensor:
        """The last layer's output at the last token of each text, [1, B, H]."""
        if self._sequences != sequences:
            self.keep(
                sequences, to_device([text.ids[-1] for text in sequences], self._cache.device)
            )
        tokens_B1 = self._ids_B.unsqueeze(1)
        if self._graphs is not None and self._graphs.are_available:
            return self._graphs.last_hidden(tokens_B1)
        view = self._cache.view(0, [1] * len(sequences))
        return self._model.hidden(tokens_B1, view)


class DecodeGraphs:
    """Graphs of the layers for one token of each text.

    A graph is recorded when its number of texts and keys is needed for the first time. If that
    fails, or its result differs from the layers', no graph is used any more.

    Args:
        model: The model, on one rank.
        cache: Keys and values, with a spare slot.
    """

    def __init__(self, model: GPTModel, cache: PreallocatedCache) -> None:
        self._model = model
        self._cache = cache
        module: Any = torch.get_device_module(cache.device)
        self._record = getattr(module, "make_graphed_callables", None)
        self._options: dict[str, Any] = {}
        self._graphs: dict[tuple[int, int], tuple[Callable[..., Tensor], object]] = {}
        if self._record is None:
            self._give_up(f"{cache.device.type} records none")
        else:  # one pool of memory, because one graph at a time is replayed
            self._options = {"pool": module.graph_pool_handle()}

    @property
    def are_available(self) -> bool:
        return self._record is not None

    def last_hidden(self, tokens_B1: Tensor) -> Tensor:
        """The last layer's output [1, B, H] for the last tokens of the first B texts."""
        cache = self._cache
        count = len(tokens_B1)
        lengths = cache.lengths[:count]
        texts = min(1 << (count - 1).bit_length(), cache.slots)
        num_keys = cache.rounded(max(lengths) + 1)
        # Texts that fill up the batch write to the spare slot.
        missing = texts - count
        starts = [*lengths, *[0] * missing]
        slots = [*range(count), *[cache.slots] * missing]
        starts_B, slots_B = to_device([starts, slots], cache.device)
        inputs = nn.functional.pad(tokens_B1, (0, 0, 0, missing)), starts_B, slots_B
        x_1BH = self._replay(texts, num_keys, inputs)
        cache.lengths[:count] = [length + 1 for length in lengths]
        return x_1BH[:, :count]

    def _replay(self, texts: int, num_keys: int, inputs: tuple[Tensor, ...]) -> Tensor:
        if (recorded := self._graphs.get((texts, num_keys))) is not None:
            return recorded[0](*inputs)
        layers = partial(self._layers, texts, num_keys)
        x_1BH = layers(*inputs)  # also allocates the memory that a graph must not
        assert self._record is not None
        try:
            static = tuple(tensor.clone() for tensor in inputs)
            graph = self._record(layers, static, **self._options)
            difference = (graph(*inputs) - x_1BH).float().norm()
            if not difference <= TOLERANCE * x_1BH.float().norm():
                raise RuntimeError("the result of a graph differs from that of the layers")
        except Exception as error:  # devices raise any type
            self._give_up(str(error).strip().partition("\n")[0] or type(error).__name__)
            return x_1BH
        # A graph reads tables of positions, which the model may replace by longer ones.
        self._graphs[texts, num_keys] = graph, self._model.positions.tables
        return x_1BH

    def _layers(
        self, texts: int, num_keys: int, tokens_B1: Tensor, starts_B: Tensor, slots_B: Tensor
    ) -> Tensor:
        view = CacheView(
            self._cache,
            slice(0, texts),
            length=min(num_keys, self._cache.capacity) - 1,
            num_keys=num_keys,
            positions_BS=starts_B.unsqueeze(1),
            slots_B=slots_B,
        )
        return self._model.hidden(tokens_B1, view)

    def _give_up(self, reason: str) -> None:
        self._record = None
        self._graphs.clear()
        warnings.warn(Problem("no-decode-graphs", reason=reason).render(), stacklevel=2)
