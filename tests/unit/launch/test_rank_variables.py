"""Ranks from the variables of launchers, MPI and Slurm, as recorded from real processes.

Claim (command-line): `srun` and `mpirun` start a run; contradicting variables are an error
"""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from megatron_ds.launch.ranks.rank_variables import (
    DEFAULT_PORT,
    PORTS,
    Environment,
    count_unused_tasks,
    find_ranks,
    first_host,
)
from tests.problems import raises_problem
from tests.tables import tables

TABLES = tables(__file__)

RECORDED = tomllib.loads(Path(__file__).with_name("recorded_environments.toml").read_text())
ALONE: dict[str, str] = {}
CONTRADICTORY = "contradictory-launcher-environment"


def variables(text: str) -> dict[str, str]:
    return dict(entry.split("=", 1) for entry in text.split())


def recorded(name: str) -> list[dict[str, str]]:
    """The environments of the first and the last rank."""
    return [variables(text) for text in RECORDED[name]]


def ranks(rank: int, size: int, local_rank: int, local_size: int, host: str) -> dict[str, str]:
    return variables(
        f"RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} LOCAL_WORLD_SIZE={local_size} "
        f"MASTER_ADDR={host}"
    )


EXPECTED = {
    name: [ranks(*row) if row else ALONE for row in rows]
    for name, rows in TABLES["expected"].items()
}


def test_every_recorded_environment_has_an_expectation() -> None:
    assert RECORDED.keys() == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_ranks_of_recorded_processes(name: str) -> None:
    found = [find_ranks(env) for env in recorded(name)]
    ports = {ranks.pop("MASTER_PORT", None) for ranks in found}
    assert found == EXPECTED[name]
    assert len(ports) == 1, "the ranks disagree about the port"
    (port,) = ports
    if EXPECTED[name][0] == ALONE:
        assert port is None
    elif name == "hydra_one_host":
        assert port == str(DEFAULT_PORT)
    else:
        assert int(port or 0) in PORTS


def test_jobs_of_one_node_use_different_ports() -> None:
    env = recorded("srun_two_nodes")[0]
    ports = {find_ranks({**env, "SLURM_JOB_ID": str(job)})["MASTER_PORT"] for job in range(50)}
    assert len(ports) == 50


def test_unused_tasks_are_counted_where_no_launcher_started_the_process() -> None:
    unused = {name: count_unused_tasks(recorded(name)[0]) for name in RECORDED}
    assert {name: count for name, count in unused.items() if count} == {
        "batch_script": 2,
        "batch_within_step": 2,
        "salloc_shell": 2,
    }


@pytest.mark.parametrize(("nodes", "first"), TABLES["node_lists"])
def test_first_host_of_a_node_list(nodes: str, first: str) -> None:
    assert first_host(nodes) == first


def test_given_rendezvous_is_kept() -> None:
    """Scripts export it together with the world size."""
    given = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "6000", "WORLD_SIZE": "4"}
    found = find_ranks({**recorded("srun_two_nodes")[1], **given})
    assert found == {"RANK": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_ranks_that_a_script_maps_itself_are_kept() -> None:
    mapped = variables("RANK=3 WORLD_SIZE=4 LOCAL_RANK=0")  # each task sees one device
    assert find_ranks({**recorded("srun_two_nodes")[1], **mapped}) == {
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "node1",
        "MASTER_PORT": find_ranks(recorded("srun_two_nodes")[0])["MASTER_PORT"],
    }


def test_several_processes_per_task_are_a_launcher_s() -> None:
    own = variables("RANK=5 WORLD_SIZE=16 LOCAL_RANK=5 MASTER_ADDR=a MASTER_PORT=1")
    agent = variables("TORCHELASTIC_RUN_ID=x GROUP_WORLD_SIZE=4")
    assert find_ranks({**recorded("srun_two_nodes")[1], **own}) == {}
    assert find_ranks({**recorded("srun_two_nodes")[1], **own, **agent}) == {}


def test_launcher_within_an_interactive_step_may_start_fewer_processes() -> None:
    own = variables("RANK=0 WORLD_SIZE=1 LOCAL_RANK=0 TORCHELASTIC_RUN_ID=x SLURM_PTY_PORT=1")
    assert find_ranks({**recorded("srun_pty")[0], **own}) == {}


MINIMAL = variables("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=1")
"""What a container may pass on."""


def test_variables_that_a_container_passes_on_suffice() -> None:
    env = {**MINIMAL, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a[1-2]"}
    found = [find_ranks({**env, "SLURM_PROCID": rank}) for rank in "01"]
    assert [ranks["RANK"] for ranks in found] == ["0", "1"]
    assert {ranks["MASTER_ADDR"] for ranks in found} == {"a1"}


@pytest.mark.parametrize(("env", "code", "shown"), TABLES["incomplete"])
def test_incomplete_variables_are_an_error(env: Environment, code: str, shown: str) -> None:
    with raises_problem(code, contains=shown):
        find_ranks(env)


@pytest.mark.parametrize(("name", "own", "shown"), TABLES["contradictions"])
def test_contradictions_name_both_variables(name: str, own: str, shown: str) -> None:
    with raises_problem(CONTRADICTORY, contains=shown) as raised:
        find_ranks({**recorded(name)[1], **variables(own)})
    assert any(entry in str(raised.problem) for entry in own.split())


def test_rank_0_must_be_on_the_first_host_of_the_list() -> None:
    """As with a distribution of the user's own, where the others would look for it in vain."""
    env = {**recorded("srun_two_nodes")[0], "SLURMD_NODENAME": "node2"}
    with raises_problem("first-rank-not-on-first-host", contains="node2"):
        find_ranks(env)
    assert find_ranks({**env, "MASTER_ADDR": "node2"})["RANK"] == "0"


def test_several_hosts_without_a_node_list_need_an_address() -> None:
    env = variables(
        "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 OMPI_COMM_WORLD_LOCAL_RANK=0 "
        "OMPI_COMM_WORLD_LOCAL_SIZE=1 PMIX_NAMESPACE=prterun-a-17@1"
    )
    with raises_problem("rendezvous-host-unknown", contains="Open MPI"):
        find_ranks(env)
    assert find_ranks({**env, "MASTER_ADDR": "a"})["RANK"] == "1"
