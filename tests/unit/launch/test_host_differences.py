"""What differs between the hosts of a run, in one message.

Claim (command-line): ranks that were started with different settings, versions or data do not
train, and say what differs; folders may differ
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from megatron_ds.config.problems import PROBLEMS_SHOWN
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.ranks.host_differences import (
    CLOCKS_APART_S,
    RankEntry,
    Verdict,
    clock_problems,
    find_differences,
    judge,
)
from tests.problems import codes, printed_codes


def entries(*hosts: str, section: str = "software", **values: Mapping[int, str]) -> list[RankEntry]:
    """A rank per host.

    Args:
        hosts: Their names; several ranks of one are given one after the other.
        section: Of the facts.
        values: By name and rank; a rank lacks a name that is not given.
    """
    facts = [
        {name: of_rank[rank] for name, of_rank in values.items() if rank in of_rank}
        for rank in range(len(hosts))
    ]
    return [RankEntry(n, host, {section: facts[n]}) for n, host in enumerate(hosts)]


def failing(*ranks: tuple[str, str, int]) -> list[RankEntry]:
    """Ranks by host, problem and status."""
    return [
        RankEntry(n, host, {}, (problem,) * bool(problem), code)
        for n, (host, problem, code) in enumerate(ranks)
    ]


@pytest.mark.parametrize(
    ("found", "text"),
    [
        (entries("a", "a", "b", torch={0: "1", 1: "1", 2: "2"}), "torch is 1 on a and 2 on b."),
        (entries("a", "b", "c", "d", "e", torch={2: "1"}), "missing on a, b, d, 1 more and 1 on c"),
        (entries("a", "a", torch={0: "1", 1: "2"}), "torch is 1 on rank 0 and 2 on rank 1."),
        (
            entries("a", "a", "b", torch={0: "1", 1: "2", 2: "1"}),
            "torch is 1 on rank 0 of a, b and 2 on rank 1 of a.",
        ),
    ],
)
def test_values_are_named_with_their_hosts_or_ranks(found: list[RankEntry], text: str) -> None:
    (problem,) = find_differences(found)
    assert problem.code == "software-differs-between-hosts"
    assert text in str(problem)


def test_equal_ranks_and_sections_that_one_rank_has_are_no_difference() -> None:
    equal = entries("a", "b", torch={0: "1", 1: "1"})
    equal[0] = RankEntry(0, "a", {**equal[0].facts, "content": {"file": "1"}})
    assert list(find_differences(equal)) == []
    assert judge(equal) == Verdict()


@pytest.mark.parametrize(
    ("section", "code"),
    [
        ("settings", "settings-differ-between-ranks"),
        ("data", "data-differs-between-hosts"),
        ("content", "data-differs-between-hosts"),
        ("devices", "software-differs-between-hosts"),
    ],
)
def test_a_section_has_a_code(section: str, code: str) -> None:
    found = entries("a", "b", section=section, name={0: "1", 1: "2"})
    assert codes(find_differences(found)) == [code]


def test_files_of_the_package_are_one_problem() -> None:
    names = {f"file{n}": {0: "1", 1: "2"} for n in range(6)}
    (problem,) = find_differences(entries("a", "b", section="source", same={0: "", 1: ""}, **names))
    assert problem.code == "source-differs-between-hosts"
    assert "file0, file1, file2, 3 more; the digest of file0 is 1 on a and 2 on b" in str(problem)


def test_modules_beside_the_program_differ_only_where_several_hosts_import_them() -> None:
    same = {0: "1", 1: "1", 2: "1"}
    one = {0: "1"}
    found = entries(
        "a", "b", "c", section="modules", shared=same, logging=one, two={0: "1", 2: "1"}
    )
    assert list(find_differences(found)) == []
    found = entries("a", "b", "c", section="modules", logging=one, helper={0: "1", 2: "2"})
    (problem,) = find_differences(found)
    assert problem.code == "source-differs-between-hosts"
    assert "differ: helper; the digest of helper is 1 on a and 2 on c" in str(problem)


def test_all_problems_and_differences_are_one_message() -> None:
    ranks = failing(("a", "common", 2), ("b", "common", 2), ("b", "common", 2))
    ranks[2] = RankEntry(2, "b", {}, ("common", "own\nwith a second line"), 1)
    others = list(find_differences(entries("a", "b", torch={0: "1", 1: "2"})))
    verdict = judge(ranks, others)
    assert verdict.code == ExitCode.HOSTS_DIFFER
    for line in ("  - common\n", "  - on rank 2 of b: own\n    with a second line\n"):
        assert line in verdict.text
    assert printed_codes(verdict.text) == ["software-differs-between-hosts", "hosts-differ"]


def test_a_problem_of_all_hosts_keeps_its_status() -> None:
    verdict = judge(failing(("a", "common", 2), ("b", "common", 2)))
    assert verdict == Verdict("common", 2)
    two = [RankEntry(n, host, {}, ("one", "two"), 2) for n, host in enumerate("ab")]
    assert judge(two).code == 2
    assert printed_codes(judge(two).text) == ["start-fails"]


def test_many_differences_are_counted() -> None:
    names = {f"x{n}": {0: "1", 1: "2"} for n in range(PROBLEMS_SHOWN + 5)}
    text = judge(entries("a", "b", **names)).text
    assert text.count("differs-between-hosts") == PROBLEMS_SHOWN
    assert "  - and 5 more\n" in text


def test_a_clock_is_compared_with_the_time_of_the_question() -> None:
    """However long the answers take."""
    asked = 1000.0
    answered = 1030.0
    limit = CLOCKS_APART_S
    clocks = {
        "right": 1010.0,
        "late": answered + limit,
        "early": asked - limit,
        "ahead": answered + limit + 1,
        "behind": asked - limit - 1,
    }
    (problem,) = clock_problems(asked, clocks, answered, "first")
    assert problem.code == "clocks-differ-between-hosts"
    assert "ahead is 61 s ahead, behind is 61 s behind, compared with first" in str(problem)
    assert list(clock_problems(asked, {"right": 1010.0}, answered, "first")) == []
