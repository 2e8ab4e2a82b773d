"""The hosts of a `deepspeed` command, and those that it has lost."""

from __future__ import annotations

import base64
import json

import pytest

from megatron_ds.launch.ranks import launched_hosts
from megatron_ds.launch.ranks.launched_hosts import LaunchWatch, describe, hosts_of_ranks
from megatron_ds.launch.watch import liveness
from megatron_ds.launch.watch.liveness import ProcessHandle, find_launchers

WORLD = base64.urlsafe_b64encode(json.dumps({"a": [0, 1], "b": [0], "c": [2]}).encode()).decode()
KEY = [f"--world_info={WORLD}", "--master_addr=a", "--master_port=1"]
AGENT = ["python", "-u", "-m", "deepspeed.launcher.launch", *KEY]
OWN = 10
SHELL = 11
SESSION = 12


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[str]]:
    """Command lines by pid: this process's agent was started by sshd."""
    found = {OWN: AGENT, SHELL: ["bash", "-c", "..."], SESSION: ["sshd: root@notty"]}
    parents = {OWN: SHELL, SHELL: SESSION}
    monkeypatch.setattr("os.getppid", lambda: OWN)
    monkeypatch.setattr(liveness, "command_of", lambda pid: found.get(pid, []))
    monkeypatch.setattr(liveness, "parent_of", parents.get)
    monkeypatch.setattr(ProcessHandle, "of", classmethod(lambda cls, pid: cls(pid, None)))
    return found


@pytest.mark.parametrize(
    ("above", "expected"),
    [
        ({}, [OWN, SESSION]),
        ({SHELL: ["sshd-session: root@notty"]}, [OWN, SHELL]),
        ({SHELL: ["-bash"]}, [OWN]),  # a shell of a user, which may end before its programs
        ({SHELL: ["python", "bin/deepspeed", "--no_ssh"]}, [OWN, SHELL]),
        ({OWN: ["srun"]}, []),
    ],
)
def test_a_session_of_sshd_is_the_launcher_of_its_agent(
    above: dict[int, list[str]], expected: list[int], processes: dict[int, list[str]]
) -> None:
    processes |= above
    assert [each.pid for each in find_launchers()] == expected


def test_ranks_are_described_with_their_hosts(processes: dict[int, list[str]]) -> None:
    assert hosts_of_ranks() == ["a", "a", "b", "c"]
    assert describe([2]) == "rank 2 on b"
    assert describe([0, 1, 3]) == "ranks 0, 1, 3 on a, c"
    processes[OWN] = ["srun"]
    assert describe([2]) == "rank 2"


@pytest.mark.parametrize(
    ("connected", "lost"), [("ab", [3]), ("c", [0, 1, 2]), ("abc", []), ("", [])]
)
def test_a_host_is_lost_when_its_client_of_ssh_has_ended(
    connected: str, lost: list[int], processes: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice seen; without any client the command runs on another host."""
    monkeypatch.setattr(launched_hosts, "WATCH_INTERVAL_S", 0.0)
    monkeypatch.setenv("LOCAL_RANK", "0")
    clients = {n: ["ssh", "-x", host, "cd /x; ..."] for n, host in enumerate(connected)}
    monkeypatch.setattr(launched_hosts, "ssh_clients", lambda: {99: ["pdsh", "a,b,c"], **clients})
    watch = LaunchWatch()
    assert watch.find_lost_ranks() == []
    assert watch.find_lost_ranks() == lost
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert watch.find_lost_ranks() == []
