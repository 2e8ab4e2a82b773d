"""The roll call of ranks on several hosts, through a real store.

Claim (command-line): ranks that do not come are named; a second attempt of torchrun, in whose store
the first one has written, starts
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.ranks import roll_call
from megatron_ds.launch.ranks.host_differences import Verdict
from megatron_ds.launch.ranks.roll_call import HostsDiffer, RollCall
from tests.distributed import run_ranks
from tests.fork_server import free_port
from tests.problems import printed_codes

RANKS = 3
TIMEOUT = timedelta(seconds=60)


@pytest.fixture(scope="module")
def verdicts() -> list[dict[str, Verdict]]:
    """By rank, those of several roll calls; no text where the run may start."""
    return run_ranks(_hold_roll_calls, RANKS, [free_port() for _ in range(4)])


def _hold_roll_calls(rank: int, ports: list[int]) -> dict[str, Verdict]:
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    socket.gethostname = lambda: f"host{rank}"
    roll_call.GOODBYE_S = 1.0  # the third rank never comes to one of them
    roll_call.ANSWER_S = 10.0  # a mistake ends the test soon
    found = {}
    ports = [*ports]

    def meet(name: str, call: RollCall, timeout: timedelta = TIMEOUT) -> None:
        try:
            call.attend(timeout)
            found[name] = Verdict()
        except HostsDiffer as error:
            found[name] = Verdict(str(error), error.code)
        call.say_goodbye()
        dist.barrier()
        call.close()

    def calls(**facts: str) -> RollCall:
        call = RollCall()
        call.describe("settings", facts)
        return call

    os.environ["MASTER_PORT"] = str(ports.pop())
    meet("equal", calls(lr="1"))
    os.environ["MASTER_PORT"] = str(ports.pop())
    if rank == 2:
        failed = calls(lr="2")
        found["failed"] = failed.report(["it lacks a file"], 2) or Verdict()
        assert failed.report(["another reason"], 1) == found["failed"]
        dist.barrier()
    else:
        meet("failed", calls(lr="1"))
    os.environ["MASTER_PORT"] = str(ports.pop())
    if rank == 2:
        dist.barrier()
    else:
        meet("absent", calls(lr="1"), timedelta(seconds=6))
    _meet_again(rank, ports.pop(), meet, calls)
    return found


def _meet_again(rank: int, port: int, meet: Any, calls: Any) -> None:
    """Two attempts of a run of torchrun, whose store keeps what the first one has written."""
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(port)}
    if rank == 0:
        store: Any = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    meet("first attempt", calls(lr=str(rank)))
    meet("second attempt", calls(lr="1"))
    if rank == 0:
        del store


def test_all_ranks_have_one_verdict(verdicts: list[dict[str, Verdict]]) -> None:
    assert verdicts[0] == verdicts[1]
    assert verdicts[2] == {name: verdicts[0][name] for name in verdicts[2]}
    starts = [name for name, verdict in verdicts[0].items() if verdict == Verdict()]
    assert starts == ["equal", "second attempt"]


def test_a_rank_that_fails_before_is_reported_with_all_differences(
    verdicts: list[dict[str, Verdict]],
) -> None:
    verdict = verdicts[2]["failed"]
    assert verdict.code == ExitCode.HOSTS_DIFFER
    assert "on host2: it lacks a file" in verdict.text
    assert "lr is 1 on host0, host1 and 2 on host2" in verdict.text
    assert printed_codes(verdict.text) == ["settings-differ-between-ranks", "hosts-differ"]


def test_ranks_that_do_not_come_are_named(verdicts: list[dict[str, Verdict]]) -> None:
    verdict = verdicts[0]["absent"]
    assert verdict.code == ExitCode.ERROR
    assert printed_codes(verdict.text) == ["ranks-missing"]
    assert "rank 2 of 3" in verdict.text
