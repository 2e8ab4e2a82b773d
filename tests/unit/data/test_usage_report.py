"""Reports of few and of many files, and of changed blends."""

from __future__ import annotations

from megatron_ds.data.blend.blend_history import (
    SourceId,
    record_consumed,
    resume_history,
    with_requests,
)
from megatron_ds.data.blend.usage_report import FileUsage, describe_blend, describe_change, summary

MANY = 2500


def identities(count: int, first: int = 0) -> list[SourceId]:
    return [SourceId(f"f{number}", "hash", (0, 9)) for number in range(first, first + count)]


def test_summary_of_many_files_is_short() -> None:
    usage = [FileUsage("train", f"f{n}", (n + 1) / MANY, n, n / 100) for n in range(MANY)]
    usage.append(FileUsage("train", "unread", 0.0, 0, 0.0))
    usage += [FileUsage("valid", "v", 1.0, 8, 0.5, "V"), FileUsage("valid", "w", 0.0, 0, 0.0, "V")]
    lines = list(summary(usage, "all.json"))
    assert len(lines) == 12 + 2 + 2 + 1
    assert lines[0] == "train: f2499, weight 1: 2499 samples, 25 epochs"
    assert lines[12].startswith("train: 2488 more files, ")
    assert lines[12].endswith(": 3093828 samples, 0 to 24.9 epochs")
    assert sum(range(2488)) == 3093828
    assert lines[13] == "train: 1 file of weight 0, not read"
    assert lines[14] == "valid V: v, weight 1: 8 samples, 0.5 epochs"
    assert lines[15] == "valid V: w, weight 0: not read"
    assert "all.json" in lines[16]


def test_change_of_many_files_is_reported_in_few_lines() -> None:
    before = resume_history(None, identities(MANY), [1 / MANY] * MANY, order=3)
    before = with_requests(record_consumed(before, [4] * MANY), [(5,)] * MANY)
    after = resume_history(before, identities(MANY, first=100), [1 / MANY] * MANY, 3, 4 * MANY)
    after = with_requests(after, [(5, 6)] * (MANY - 100) + [(2,)] * 100)
    lines = describe_change(before, after)
    assert "after 10000 samples" in lines[0]
    text = "\n".join(lines)
    for part in (
        "continued: f100 at its sample 4, f101 at its sample 4,",
        "and 2394 more",
        "no longer read: f0, after 4 samples,",
        "new: f2500, f2501,",
        "f100, f101, f102, f103, f104, f105 and 2394 more",
    ):
        assert part in text
    assert max(map(len, lines)) < 250
    assert describe_change(after, after) == []
    assert describe_blend(after).startswith("training data, 2500 sources: f100 0.0004, ")
    assert describe_blend(after).endswith(" and 2494 more; changed after 10,000 samples")


def test_changed_schedule_version_is_reported() -> None:
    before = resume_history(None, identities(2), [0.5, 0.5], order=2)
    lines = describe_change(before, resume_history(before, identities(2), [0.5, 0.5], 3, 0))
    assert lines[0].startswith("WARNING: ")
