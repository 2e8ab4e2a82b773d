"""Variables that a launcher does not pass on to all hosts.

Claim (command-line): environment variables of the launching shell that other hosts lack are named
at the start
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ds.launch.ranks.host_variables import HostVariables, describe, find_missing
from megatron_ds.launch.watch import liveness
from megatron_ds.launch.watch.liveness import ProcessHandle

AGENT = ("--world_info=eyJh", "--master_addr=10.0.0.1", "--master_port=29500")


def ranks(*hosts: str, launcher: str = "") -> list[HostVariables]:
    """A rank per `host: VARIABLES`; the first one's host has the launcher."""
    names = [frozenset(text.partition(":")[2].split()) for text in hosts]
    starts = [frozenset(launcher.split()), *[frozenset[str]()] * len(hosts)]
    return [
        HostVariables(text.partition(":")[0], own, start)
        for text, own, start in zip(hosts, names, starts, strict=False)
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (ranks("a:HF_HOME", "a:HF_HOME", "b:HF_HOME"), {}),
        (ranks("a:HF_HOME", "a:", "b:HF_HOME"), {}),  # no other host lacks it
        (ranks("a:", "b:HF_HOME"), {}),
        (ranks("a:HF_HOME", "b:", "b:", "c:"), {"HF_HOME": ["b", "c"]}),
        (ranks("a:", "b:", launcher="HF_HOME"), {"HF_HOME": ["a", "b"]}),
        (ranks("a:X", "b:Y", launcher="X Y"), {"X": ["b"], "Y": ["a"]}),
    ],
)
def test_hosts_that_lack_a_variable(
    found: list[HostVariables], expected: dict[str, list[str]]
) -> None:
    assert find_missing(found) == expected


def test_many_hosts_are_counted() -> None:
    missing = {"HF_HOME": list("abc"), "NCCL_DEBUG": list("abcde")}
    assert describe(missing) == "HF_HOME (a, b, c), NCCL_DEBUG (a, b, c, 2 more)"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="reads /proc")
@pytest.mark.parametrize(("port", "expected"), [("29500", {"HF_HOME"}), ("29501", set())])
def test_the_client_of_ssh_has_the_variables_of_the_command(
    port: str, expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent of this process is that of another process's arguments, if the port is its own."""
    wait = [sys.executable, "-c", "print(flush=True); input()"]
    remote = " ".join([*AGENT[:2], f"--master_port={port}"])
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    variables = {"HF_HOME": "/x", "LANG": "C"}
    agent = subprocess.Popen([*wait, *AGENT], env={}, **pipes)
    client = subprocess.Popen(
        ["pdsh", *wait[1:], remote], executable=sys.executable, env=variables, **pipes
    )
    try:
        for process in (agent, client):
            process.stdout.readline()
        handle = ProcessHandle.of(agent.pid)
        monkeypatch.setattr(liveness, "find_launchers", lambda: (handle,))
        monkeypatch.setenv("LOCAL_RANK", "0")
        assert HostVariables.here().launcher == expected
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert HostVariables.here().launcher == set()
    finally:
        for process in (agent, client):
            process.communicate(b"\n")
