"""The three indexes against Megatron's definition of a sample, told in plain Python over a list of
every token, on random files, parts of files, lengths and seeds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron_ds.data.sample_index import build_indexes


@dataclass(frozen=True)
class Case:
    """tokens: of each sequence of the file. part: first and one past the last that may be read."""

    tokens: list[int]
    part: tuple[int, int]
    wanted: int
    seq_length: int
    seed: int

    @property
    def documents(self) -> list[int]:
        return list(range(*self.part))


@dataclass(frozen=True)
class Plan:
    """epochs: passes over the documents. samples: that they give. apart: those of all but the last
    epoch, if the last one is shuffled for itself."""

    epochs: int
    samples: int
    apart: int | None


def plan_of(case: Case) -> Plan:
    """As many whole epochs as the samples take. Neighbours share a token, so a stream of T tokens
    has (T - 1) // S samples. A last epoch of which less than 80 % of its samples are asked for is
    not mixed with the others."""
    epoch = sum(case.tokens[number] for number in case.documents)
    epochs = 1
    while (epochs * epoch - 1) // case.seq_length < case.wanted:
        epochs += 1
    samples = (epochs * epoch - 1) // case.seq_length
    before = ((epochs - 1) * epoch - 1) // case.seq_length
    enough = int(0.80 * ((epoch - 1) // case.seq_length))
    separate = epochs > 1 and case.wanted - before < enough
    return Plan(epochs, samples, before if separate else None)


def shuffled(numbers: list[int], rng: np.random.RandomState, dtype: type) -> list[int]:
    array = np.array(numbers, dtype=dtype)
    rng.shuffle(array)
    return [int(number) for number in array]


def defined(case: Case) -> tuple[list[int], list[tuple[int, int]], list[int]]:
    """Document, sample and shuffle index. One generator makes all choices, in this order."""
    plan, rng = plan_of(case), np.random.RandomState(case.seed)
    if plan.apart is None:
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
    starts[0] = (0, 0)  # the first begins with the first document, even one without tokens
    cut = plan.samples if plan.apart is None else plan.apart
    mixed = shuffled(list(range(cut)), rng, np.uint32)
    mixed += shuffled(list(range(cut, plan.samples)), rng, np.uint32)
    return order, starts, mixed


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.lists(st.integers(0, 30), min_size=1, max_size=20))
    first = draw(st.integers(0, len(tokens) - 1))
    end = draw(st.integers(first + 1, len(tokens)))
    assume(sum(tokens[first:end]) > 1)
    return Case(
        tokens,
        (first, end),
        draw(st.integers(1, 80)),
        draw(st.integers(1, 40)),
        draw(st.integers(0, 2**32 - 1)),
    )


SEEN: set[tuple[bool, bool]] = set()
"""Whether more than one epoch was needed, and whether the last one stood apart."""


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=cases())
def check_case(case: Case) -> None:
    built = build_indexes(
        np.array(case.tokens, dtype=np.int32),
        np.array(case.documents),
        case.wanted,
        case.seq_length,
        case.seed,
    )
    order, starts, mixed = defined(case)
    assert built.documents.tolist() == order
    assert [tuple(row) for row in built.samples.tolist()] == starts
    assert built.shuffle.tolist() == mixed
    plan = plan_of(case)
    SEEN.add((plan.epochs > 1, plan.apart is not None))


def test_all_three_indexes_are_as_megatron_defines_them() -> None:
    check_case()
    assert {(False, False), (True, False), (True, True)} == SEEN
