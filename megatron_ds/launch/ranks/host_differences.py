"""Compares what the ranks of a run were started with, and words what differs between their hosts.

Pure functions of the entries of a roll call; which facts there are is up to the callers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_ds.config.checks import shortened
from megatron_ds.config.problems import PROBLEMS_SHOWN, Problem
from megatron_ds.launch.exit_codes import ExitCode

CLOCKS_APART_S = 60.0
"""Difference of two hosts' clocks that is an error. Kerberos and signed requests to object stores
fail from 5 and 15 minutes on, during the run; logs of several hosts are already useless."""
SHOWN_PLACES = 3
SHOWN_FILES = 3
MISSING = "missing"
SETTINGS = "settings"
DATA = "data"
CONTENT = "content"
SOFTWARE = "software"
DEVICES = "devices"
SOURCE = "source"
"""The section of the package's files, whose differences are one problem."""
MODULES = "modules"
"""The section of imported files next to the program, which not every host needs to import."""


@dataclass(frozen=True)
class RankEntry:
    """Answer of a rank at the roll call.

    Attributes:
        rank: Global rank.
        host: Name of its host.
        facts: Facts by section and name. A section that a rank lacks is not compared.
        problems: Why it cannot start.
        code: Exit status that the problems have by themselves.
        is_first: Whether it is the first rank of its host, or of a container there.
    """

    rank: int
    host: str
    facts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    code: int = ExitCode.FINISHED
    is_first: bool = True


@dataclass(frozen=True)
class Verdict:
    """Reason that a run cannot start; no text if it can.

    Attributes:
        text: Message for the user.
        code: Exit status of all ranks.
    """

    text: str = ""
    code: int = ExitCode.FINISHED


def judge(
    entries: Sequence[RankEntry], others: Iterable[Problem] = (), absent: Problem | None = None
) -> Verdict:
    """The verdict on a run.

    Args:
        entries: Answers of the ranks that have arrived.
        others: Further differences of the hosts.
        absent: About ranks that have not come in time.
    """
    differences = [*find_differences(entries), *others]
    by_problem: dict[str, list[RankEntry]] = {}
    for entry in entries:
        for problem in entry.problems:
            by_problem.setdefault(problem, []).append(entry)
    if not differences and not by_problem:
        return Verdict() if absent is None else Verdict(absent.render(), ExitCode.ERROR)
    differences += [] if absent is None else [absent]
    hosts = {entry.host for entry in entries}
    lines = []
    is_common = not differences
    for problem, members in by_problem.items():
        if hosts == {entry.host for entry in members}:
            lines.append(problem)
        else:
            is_common = False
            lines.append(f"on {_places(members, entries)}: {problem}")
    lines += [difference.render() for difference in differences]
    if len(lines) > PROBLEMS_SHOWN:
        lines[PROBLEMS_SHOWN:] = [f"and {len(lines) - PROBLEMS_SHOWN} more"]
    if is_common and len(lines) == 1:
        return Verdict(lines[0], max(entry.code for entry in entries))
    listed = "\n".join(f"  - {line}".replace("\n", "\n    ") for line in lines)
    if is_common:
        code = max(entry.code for entry in entries)
        return Verdict(Problem("start-fails", listed=listed).render(), code)
    return Verdict(Problem("hosts-differ", listed=listed).render(), ExitCode.HOSTS_DIFFER)


def find_differences(entries: Sequence[RankEntry]) -> Iterator[Problem]:
    """Problems of facts that differ between ranks, by section; a name in its first one alone."""
    reported = set[str]()
    for section in dict.fromkeys(name for entry in entries for name in entry.facts):
        members = [entry for entry in entries if section in entry.facts]
        differing = [name for name in _differing(section, members) if name not in reported]
        reported.update(differing)
        if section in (SOURCE, MODULES) and differing:
            yield _source_problem(section, members, differing)
            continue
        for name in differing:
            values = {"name": name, "values": _values(section, name, members)}
            if section == SETTINGS:
                yield Problem("settings-differ-between-ranks", **values)
            elif section in (DATA, CONTENT):
                yield Problem("data-differs-between-hosts", **values)
            else:
                yield Problem("software-differs-between-hosts", **values)


def clock_problems(
    asked: float, clocks: Mapping[str, float], answered: float, first: str
) -> Iterator[Problem]:
    """Hosts with another time than the first rank's host.

    A host reads its clock between two readings of the first rank's: what is outside of them by more
    than `CLOCKS_APART_S` is the clock's fault, however slow the network is.

    Args:
        asked: Time of the first rank, in seconds, before it asked the hosts for theirs.
        clocks: Their answers.
        answered: Time of the first rank after it had all answers.
        first: Name of the host of the first rank.
    """
    apart = []
    for host, clock in clocks.items():
        ahead = clock - answered if clock > answered else min(0.0, clock - asked)
        if abs(ahead) > CLOCKS_APART_S:
            apart.append(f"{host} is {abs(ahead):.0f} s {'ahead' if ahead > 0 else 'behind'}")
    if apart:
        listed = shortened(apart, SHOWN_PLACES)
        yield Problem("clocks-differ-between-hosts", listed=listed, first=first)


def _differing(section: str, members: Sequence[RankEntry]) -> Iterator[str]:
    first = members[0].facts[section]
    if all(entry.facts[section] == first for entry in members):
        return
    for name in dict.fromkeys(name for entry in members for name in entry.facts[section]):
        if len(_by_value(section, name, members)) > 1:
            yield name


def _by_value(
    section: str, name: str, members: Sequence[RankEntry]
) -> dict[str | None, list[RankEntry]]:
    groups: dict[str | None, list[RankEntry]] = {}
    for entry in members:
        value = entry.facts[section].get(name)
        if value is not None or section != MODULES:
            groups.setdefault(value, []).append(entry)
    return groups


def _source_problem(section: str, members: Sequence[RankEntry], files: Sequence[str]) -> Problem:
    """One problem of all files of a section that differ."""
    return Problem(
        "source-differs-between-hosts",
        files=shortened(files, SHOWN_FILES),
        first=files[0],
        values=_values(section, files[0], members),
    )


def _values(section: str, name: str, members: Sequence[RankEntry]) -> str:
    """Such as `1 on node1, node2 and 2 on node3`."""
    values = _by_value(section, name, members).items()
    return " and ".join(
        f"{value or MISSING} on {_places(having, members)}" for value, having in values
    )


def _places(members: Sequence[RankEntry], all_entries: Sequence[RankEntry]) -> str:
    """Location of some ranks: their hosts, or ranks where a host has others or is the only one."""
    ranks = {entry.rank for entry in members}
    incomplete = {entry.host for entry in all_entries if entry.rank not in ranks}
    is_single = len({entry.host for entry in all_entries}) == 1
    names = []
    for entry in members:
        name = f"rank {entry.rank}" if entry.host in incomplete else entry.host
        names.append(f"{name} of {entry.host}" if name != entry.host and not is_single else name)
    return shortened(list(dict.fromkeys(names)), SHOWN_PLACES)
