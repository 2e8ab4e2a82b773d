"""The rules of --blend-order: weights and order of the sources of a blend, and requested samples.

A rule is an object, so that what plans a blend asks it instead of comparing names. The orders are
computed by `blend_schedule.py`. Knows sizes and weights, but no files.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ds.data.blend.blend_schedule import FAIR, blend_order, order_version
from megatron_ds.data.blend.blended_dataset import BlendOrder
from megatron_ds.data.blend.megatron_blend import core_samples_per_source, normalized
from megatron_ds.data.index_cache import ArrayCache
from megatron_ds.data.sample_index import samples_per_source


@dataclass(frozen=True)
class SourceSize:
    """Size of a source, and its weight in the flags.

    Attributes:
        given_weight: The weight as it was given; None if the sources of the blend have none.
        weight: The weight of all given ones that are scaled to sum to 1; None as above.
        tokens: Tokens of its documents.
        samples_per_epoch: Samples of one epoch.
    """

    given_weight: float | None
    weight: float | None
    tokens: int
    samples_per_epoch: int


class BlendRule(Protocol):
    """A value of --blend-order."""

    @property
    def version(self) -> int:
        """Version of the order, which differs from the versions of other rules."""

    def weights(self, sources: Sequence[SourceSize]) -> list[float]:
        """Weights of the sources, which sum to 1; by default in proportion to their sizes."""

    def order(self, weights: Sequence[float], num_samples: int, cache: ArrayCache) -> BlendOrder:
        """The order of the samples of several sources, whose counts may be cached."""

    def requested(
        self, sources: Sequence[SourceSize], weights: Sequence[float], order: BlendOrder
    ) -> list[int]:
        """Samples to request of each source, which determine the order of its documents."""


class FairRule:
    """Every source stays within one sample of its weight. Implements `BlendRule`."""

    version = order_version(FAIR)

    def weights(self, sources: Sequence[SourceSize]) -> list[float]:
        total = sum(source.tokens for source in sources)
        return [
            source.tokens / total if source.weight is None else source.weight for source in sources
        ]

    def order(self, weights: Sequence[float], num_samples: int, cache: ArrayCache) -> BlendOrder:
        return blend_order(weights, num_samples, cache, FAIR)

    def requested(
        self, sources: Sequence[SourceSize], weights: Sequence[float], order: BlendOrder
    ) -> list[int]:
        return samples_per_source(weights, len(order))


Request = Callable[[Sequence[SourceSize], Sequence[float], int], list[int]]
"""Samples that a version of Megatron requests of sources, by their weights, for a blend."""


class MegatronRule:
    """The order and requests of a version of Megatron. Implements `BlendRule`.

    Args:
        name: The value of --blend-order.
        request: Samples that this version requests of each source.
    """

    def __init__(self, name: str, request: Request) -> None:
        self.version = order_version(name)
        self._name = name
        self._request = request

    def weights(self, sources: Sequence[SourceSize]) -> list[float]:
        given_weights = _given_weights(sources)
        if given_weights is None:
            return normalized([source.samples_per_epoch for source in sources])
        return normalized(normalized(given_weights))

    def order(self, weights: Sequence[float], num_samples: int, cache: ArrayCache) -> BlendOrder:
        return blend_order(weights, num_samples, cache, self._name)

    def requested(
        self, sources: Sequence[SourceSize], weights: Sequence[float], order: BlendOrder
    ) -> list[int]:
        requested = self._request(sources, weights, len(order))
        # The greedy order may take more than these of rare files, which Megatron then lacks.
        taken = order.counts_at(len(order)).tolist()
        return [max(counts) for counts in zip(requested, taken, strict=True)]


def _given_weights(sources: Sequence[SourceSize]) -> list[float] | None:
    """The weights as they were given; None if there are none."""
    given_weights = [source.given_weight for source in sources if source.given_weight is not None]
    return given_weights if len(given_weights) == len(sources) else None


def _core_request(
    sources: Sequence[SourceSize], weights: Sequence[float], num_samples: int
) -> list[int]:
    """The request of Megatron Core: by given weights or, without them, one epoch of each source."""
    given_weights = _given_weights(sources)
    if given_weights is None:
        return [source.samples_per_epoch for source in sources]
    return core_samples_per_source(normalized(given_weights), num_samples)


def _deepspeed_request(
    sources: Sequence[SourceSize], weights: Sequence[float], num_samples: int
) -> list[int]:
    """The request of the Megatron-DeepSpeed forks and of older Megatron-LM."""
    return samples_per_source(weights, num_samples)


RULES: dict[str, BlendRule] = {
    FAIR: FairRule(),
    "megatron": MegatronRule("megatron", _core_request),
    "megatron-deepspeed": MegatronRule("megatron-deepspeed", _deepspeed_request),
}
"""Rules by the value of --blend-order."""
