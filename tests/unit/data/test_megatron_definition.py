"""Property test of the three indexes against Megatron's definition of a sample.

The definition is implemented in plain Python on a list of all tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ds.data.sample_index import build_indexes


@dataclass(frozen=True)
class Case:
    """A dataset: token counts of the file's sequences, document range, requested samples."""

    tokens: list[int]
    document_range: tuple[int, int]
    num_samples: int
    seq_length: int
    seed: int

    @property
    def documents(self) -> list[int]:
        return list(range(*self.document_range))


@dataclass(frozen=True)
class Plan:
    """Number of epochs, their samples, and the samples before a separately shuffled last epoch."""

    epochs: int
    samples: int
    before_last: int | None


def plan_of(case: Case) -> Plan:
    """The fewest complete epochs with enough samples.

    Neighbours share a token, so T tokens give (T - 1) // S samples. A last epoch of which less than
    80 % of the samples are requested is not mixed with the others.
    """
    epoch = sum(case.tokens[number] for number in case.documents)
    epochs = 1
    while (epochs * epoch - 1) // case.seq_length < case.num_samples:
        epochs += 1
    samples = (epochs * epoch - 1) // case.seq_length
    before = ((epochs - 1) * epoch - 1) // case.seq_length
    enough = int(0.80 * ((epoch - 1) // case.seq_length))
    separate = epochs > 1 and case.num_samples - before < enough
    return Plan(epochs, samples, before if separate else None)


def shuffled(numbers: list[int], rng: np.random.RandomState, dtype: type) -> list[int]:
    array = np.array(numbers, dtype=dtype)
    rng.shuffle(array)
    return [int(number) for number in array]


def reference_indexes(case: Case) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Document, sample and shuffle index, shuffled by one generator in this order."""
    plan, rng = plan_of(case), np.random.RandomState(case.seed)
    if plan.before_last is None:
        order = shuffled(case.documents * plan.epochs, rng, np.int32)
    else:
        order = shuffled(case.documents * (plan.epochs - 1), rng, np.int32)
        order += shuffled(case.documents, rng, np.int32)
    stream = [
        (position, offset)
        for position, number in enumerate(order)
        for offset in range(case.tokens[number])
    ]
    starts = [stream[sample * case.seq_length] for sample in range(plan.samples + 1)]
    starts[0] = (0, 0)  # also if the first document has no tokens
    middle = plan.samples if plan.before_last is None else plan.before_last
    mixed = shuffled(list(range(middle)), rng, np.uint32)
    mixed += shuffled(list(range(middle, plan.samples)), rng, np.uint32)
    return order, starts, mixed


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.lists(st.integers(0, 30), min_size=1, max_size=20))
    first = draw(st.integers(0, len(tokens) - 1))
    end = draw(st.integers(first + 1, len(tokens)))
    assume(sum(tokens[first:end]) > 1)
    request = draw(st.tuples(st.integers(1, 80), st.integers(1, 40), st.integers(0, 2**32 - 1)))
    return Case(tokens, (first, end), *request)


SEEN: set[tuple[bool, bool]] = set()
"""Covered cases: several epochs, and a separate last epoch."""


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=cases())
def check_case(case: Case) -> None:
    request = (case.num_samples, case.seq_length, case.seed)
    built = build_indexes(np.array(case.tokens, np.int32), np.array(case.documents), *request)
    order, starts, mixed = reference_indexes(case)
    assert built.documents.tolist() == order
    assert [tuple(row) for row in built.samples.tolist()] == starts
    assert built.shuffle.tolist() == mixed
    plan = plan_of(case)
    SEEN.add((plan.epochs > 1, plan.before_last is not None))


def test_indexes_equal_megatrons_definition() -> None:
    check_case()
    assert {(False, False), (True, False), (True, True)} == SEEN
