"""Blend history: each source gives its samples in order, whatever changes in the blend."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ds.data.blend.blend_history import (
    BlendHistory,
    BlendPhase,
    SourceId,
    extend_requests,
    record_consumed,
    resume_history,
    with_copy_numbers,
    with_requests,
)
from megatron_ds.data.blend.blend_schedule import blend_order
from megatron_ds.data.sample_index import build_indexes, total_samples

ORDER = 2
STEADY = settings(derandomize=True, deadline=None, database=None, max_examples=40)


def named(*names: str) -> list[SourceId]:
    return with_copy_numbers([SourceId(name, f"hash of {name}", (0, 9)) for name in names])


def test_unchanged_blend_keeps_the_history() -> None:
    a, b = named("a", "b")
    first = record_consumed(resume_history(None, [a, b], [0.25, 0.75], ORDER), [1, 3])
    assert resume_history(first, [a, b], [0.25, 0.75 * (1 + 1e-15)], ORDER, 4) is first


@pytest.mark.parametrize(
    ("names", "weights", "order"),
    [
        ("ab", [0.5, 0.5], ORDER),
        ("ba", [0.75, 0.25], ORDER),
        ("a", [1.0], ORDER),
        ("abc", [0.2, 0.6, 0.2], ORDER),
        ("ab", [0.25, 0.75], ORDER + 1),
    ],
)
def test_changed_blend_begins_a_phase(names: str, weights: list[float], order: int) -> None:
    a, b = named("a", "b")
    first = record_consumed(resume_history(None, [a, b], [0.25, 0.75], ORDER), [1, 3])
    after = resume_history(first, named(*names), weights, order, 4)
    assert after.phases[0] == first.phases[0]
    starts = {"a": 1, "b": 3, "c": 0}
    assert after.current == BlendPhase(
        4, tuple("abc".index(n) for n in names), tuple(weights), tuple(starts[n] for n in names)
    )
    assert len(after.sources) == (3 if "c" in names else 2)


def test_change_before_the_first_sample_replaces_the_phase() -> None:
    a, b = named("a", "b")
    first = record_consumed(resume_history(None, [a, b], [0.5, 0.5], ORDER), [2, 2])
    second = record_consumed(resume_history(first, [a], [1.0], ORDER, 4), [0])
    third = resume_history(second, [b], [1.0], ORDER, 4)
    assert third.phases == (first.current, BlendPhase(4, (1,), (1.0,), (2,)))


def test_source_identity_includes_documents_and_copies() -> None:
    a = SourceId("a", "x", (0, 9))
    shorter = SourceId("a", "x", (0, 8))
    changed = SourceId("a", "y", (0, 9))
    assert [one.copy for one in with_copy_numbers([a, a, shorter, a])] == [0, 1, 0, 2]
    first = record_consumed(resume_history(None, [a], [1.0], ORDER), [5])
    for other in (shorter, changed):
        assert resume_history(first, [other], [1.0], ORDER, 5).current.source_starts == (0,)


def test_json_round_trip() -> None:
    a, b = named("a", "b")
    history = with_requests(resume_history(None, [a, b], [1 / 3, 2 / 3], ORDER), [(7,), (12, 5)])
    history = resume_history(record_consumed(history, [4, 8]), [b], [1.0], ORDER, 12)
    assert BlendHistory.from_dict(json.loads(json.dumps(history.to_dict()))) == history


def damaged(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """A record with another value at a path; None removes it."""
    record = json.loads(
        json.dumps(resume_history(None, named("a", "b"), [0.5, 0.5], ORDER).to_dict())
    )
    at = record
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    if value is None:
        del at[path[-1]]
    return record


DAMAGED_VALUES: dict[tuple[Any, ...], list[Any]] = {
    ("format",): [1, None],
    ("order",): ["2"],
    ("phases",): [[], None],
    ("sources",): [[1]],
    ("sources", 0, "consumed"): [-1, 1.5],
    ("sources", 0, "requests"): [[True]],
    ("sources", 0, "identity", "documents"): [[0]],
    ("phases", 0, "sources"): [[0, 7]],
    ("phases", 0, "weights"): [[0.5], [0.5, float("nan")]],
    ("phases", 0, "source_starts"): ["00"],
}


@pytest.mark.parametrize("path", DAMAGED_VALUES)
def test_damaged_record_is_rejected(path: tuple[Any, ...]) -> None:
    for value in DAMAGED_VALUES[path]:
        with pytest.raises(ValueError, match=r"\w"):
            BlendHistory.from_dict(damaged(path, value))


@given(
    tokens=st.integers(1, 300),
    seq_length=st.integers(1, 20),
    steps=st.lists(st.integers(0, 60), min_size=1, max_size=5),
)
@STEADY
def test_requests_are_kept_and_extended(tokens: int, seq_length: int, steps: list[int]) -> None:
    requests: tuple[int, ...] = ()
    needed = 0
    for step in steps:
        needed += step
        longer = extend_requests(requests, needed, tokens, seq_length)
        assert longer[: len(requests)] == requests
        assert len(longer) <= len(requests) + 1
        assert sum(total_samples(each, tokens, seq_length) for each in longer) >= needed
        assert extend_requests(longer, needed, tokens, seq_length) is longer
        requests = longer


@given(tokens=st.integers(1, 200), seq_length=st.integers(1, 20), request=st.integers(1, 50))
@STEADY
def test_total_samples_equals_the_index(tokens: int, seq_length: int, request: int) -> None:
    made = build_indexes(np.array([tokens]), np.array([0]), request, seq_length, 1)
    assert total_samples(request, tokens, seq_length) == len(made.shuffle)


@given(data=st.data())
@STEADY
def test_every_source_gives_its_samples_once_and_in_order(data: st.DataObject) -> None:
    """Runs of random lengths with random blends: the samples of each source are 0, 1, 2, ...

    Claim (samples): a blend may change on resume: within a source, no sample is repeated or skipped
    """
    history: BlendHistory | None = None
    consumed = 0
    given_of = {name: list[int]() for name in "abcde"}
    for _ in range(data.draw(st.integers(1, 5))):
        names = data.draw(st.lists(st.sampled_from("abcde"), min_size=1, max_size=4, unique=True))
        parts = [data.draw(st.integers(1, 5)) for _ in names]
        weights = [part / sum(parts) for part in parts]
        if history is None:
            history = resume_history(None, named(*names), weights, ORDER)
        else:
            history = resume_history(history, named(*names), weights, ORDER, consumed)
        phase = history.current
        members = [history.sources[number].identity.name for number in phase.sources]
        assert members == names
        end = consumed + data.draw(st.integers(0, 30))
        order = blend_order(phase.weights, end - phase.first_sample)
        for position in range(consumed, end):
            source, sample = order.locate(position - phase.first_sample)
            given_of[members[source]].append(phase.source_starts[source] + sample)
        consumed = end
        history = record_consumed(history, order.counts_at(end - phase.first_sample).tolist())
        for source_now in history.sources:
            assert source_now.consumed == len(given_of[source_now.identity.name])
    assert all(found == list(range(len(found))) for found in given_of.values())
    assert sum(map(len, given_of.values())) == consumed
