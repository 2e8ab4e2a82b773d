"""A fault of one node ends the run on all nodes, with one message that names the node."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest

from megatron_ds.launch.exit_codes import ExitCode
from tests.cluster.cluster import SLOTS, Cluster, Done, find_obstacle
from tests.e2e.runs import ENDLESS, FAULTS, PRETRAIN, PROGRAMS, REPOSITORY, Settings, to_flags
from tests.problems import printed_codes

RANK = f"""env NODE_FAULTS= WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 RANK={{node}} LOCAL_RANK=0
    MASTER_ADDR=node1 MASTER_PORT=29500 {sys.executable}"""
"""What starts one process on each node."""
TORCHRUN = f"""{PROGRAMS}/torchrun --nnodes 2 --nproc-per-node {SLOTS} --node-rank {{node}}
    --master-addr node1 --master-port 29500"""
DEEPSPEED = f"{PROGRAMS}/deepspeed --hostfile hosts".split()
CHANGED = REPOSITORY / "megatron_ds" / "schedules.py"
"""A file that is another one on the second node."""


@pytest.fixture(scope="module")
def settings(cluster: Cluster, base: Settings) -> Settings:
    """Of a run on two nodes with a copy of the data on each."""
    folder = Path(base["data_path"]).parent
    cluster.run_on_all("cp", "-r", folder, cluster.scratch / "data")
    (cluster.shared / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    (cluster.shared / ".deepspeed_env").write_text("DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\n")
    data = cluster.scratch / "data" / Path(base["data_path"]).name
    return {**base, "data_path": data, "global_batch_size": 4, "train_iters": 1}


def start(
    cluster: Cluster, settings: Settings, environment: Mapping[str, str] | None = None
) -> list[Done]:
    """Runs a process on each node."""
    flags = to_flags(settings)
    return cluster.run_on_all(*RANK.split(), PRETRAIN, *flags, environment=environment)


def message(done: list[Done]) -> str:
    """The only message of a run that cannot start, which the first node prints."""
    assert [each.code for each in done] == [ExitCode.HOSTS_DIFFER] * 2, done
    assert printed_codes(done[1].output) == []
    output = done[0].output
    assert output.count("the run cannot start") == 1
    assert "Traceback" not in output
    return output


@pytest.fixture
def faulty(cluster: Cluster) -> Iterator[dict[str, str]]:
    """Variables that inject `node_faults`, of the second node only."""
    faults = cluster.scratch / "faults"
    source = Path(__file__).with_name("node_faults.py")
    cluster.run_on_all("mkdir", faults)
    cluster.run_on_all("cp", source, faults / "sitecustomize.py")
    yield {"PYTHONPATH": f"{faults}:{REPOSITORY}"}
    cluster.run_on_all("rm", "-r", faults)


def test_all_differences_of_the_nodes_are_one_message(
    cluster: Cluster, settings: Settings, faulty: dict[str, str]
) -> None:
    """Nothing is left of it in the folders, either.

    Claim (command-line): settings, a package's version, a source file, a token's value, the clock,
    the number of devices and `--save` that differ on two nodes are one message of one rank, with
    the nodes and values; all ranks end with status 7

    Claim (checkpoints): `--save` and `--load` folders that the hosts do not share are rejected, and
    left as they were; one that shows files late is not
    """
    node = cluster.nodes[1]
    scratch = cluster.scratch
    data = f"{settings['data_path']}.bin"
    package = scratch / "faults" / "numpy-1.0.dist-info"
    changes = f"""
        mkdir {package}; echo 'Version: 1.0' > {package}/METADATA
        (cat {CHANGED}; echo) > {scratch}/changed.py; mount --bind {scratch}/changed.py {CHANGED}
        cp {data} {data}.right; printf '\\1' | dd of={data} bs=1 seek=100 conv=notrunc status=none
        sed -i 's/^FAULTS = .*/FAULTS = ["clock", "devices"]/' {scratch}/faults/sitecustomize.py
    """
    node.run("sh", "-ec", changes).succeed()
    own = {**settings, "save": scratch / "save", "weight_decay": "0.{node}"}
    found = message(start(cluster, own, faulty))
    node.run("sh", "-ec", f"umount {CHANGED}; mv {data}.right {data}").succeed()
    assert sorted(printed_codes(found)) == [
        "clocks-differ-between-hosts",
        "data-differs-between-hosts",
        "folder-not-shared",
        "hosts-differ",
        "more-processes-than-devices",
        "settings-differ-between-ranks",
        "software-differs-between-hosts",
        "source-differs-between-hosts",
    ]
    for part in (
        "--weight-decay is 0.0 on node1 and 0.1 on node2",
        r"numpy is [\d.]+ on node1 and 1.0 on node2",
        r"schedules.py is \w+ on node1 and \w+ on node2",
        "node2 is 3[56].. s ahead",
        rf"{scratch}/save on node1\b.* not visible to node2 \({scratch}/save\)",
        "on node2: 2 processes on this host, but 1 visible device",
    ):
        assert re.search(part, found), f"{part}\n{found}"
    assert all(d.output == "" for d in cluster.run_on_all("sh", "-c", f"ls {scratch} | grep save"))


def test_data_that_one_node_lacks_is_one_message_of_all_nodes(
    cluster: Cluster, settings: Settings
) -> None:
    """With a problem that all nodes have, and a warning of the node that another one does not.

    Claim (command-line): a data file that one of two nodes lacks, and a flag that is wrong on both,
    are one message
    """
    node = cluster.nodes[1]
    prefix = settings["data_path"]
    node.run("mv", f"{prefix}.bin", f"{prefix}.away").succeed()
    found = message(start(cluster, {**settings, "seed": -1}))
    node.run("mv", f"{prefix}.away", f"{prefix}.bin").succeed()
    assert sorted(printed_codes(found)) == ["data-file-missing", "hosts-differ", "out-of-range"]
    assert re.search(rf"on node2: .*{prefix}.bin", found)
    assert re.search(r"- --seed", found)


def test_rank_that_is_stopped_ends_the_run_with_a_report_that_names_its_node(
    cluster: Cluster, settings: Settings
) -> None:
    """The log has named the slowest ranks and nodes before.

    Claim (command-line): a rank that is stopped (SIGSTOP) on one of two nodes ends the run; the
    report names its node, and that of `--log-straggler` ranks and nodes
    """
    logs = cluster.shared / "logs"
    stopped = {"FAULT": "iteration:3:stop", "FAULT_RANK": "3"}
    own = {**settings, "train_iters": ENDLESS, "hang_timeout": 5, "log_dir": logs}
    own |= {"log_straggler": True, "global_batch_size": 8}
    done = cluster.run_on_all(*TORCHRUN.split(), FAULTS, *to_flags(own), environment=stopped)
    output = "".join(each.output for each in done)
    assert [each.code for each in done] == [1, 1]
    (line,) = re.findall(r"^faults.py: rank \d on node\d: no progress .*", output, re.MULTILINE)
    assert re.search(r"rank 3 (on node2|\(process \d+\) is stopped)", line)
    spread = r"step without communication \(ms\) \| hosts: 2 \|.*slowest: node[12] [\d.]+ \("
    assert re.search(spread, output)
    assert re.search(r"\| ranks: 4 \|.*slowest: rank [0-3] on node[12] ", output)
    reports = {path.name: path.read_text() for path in logs.glob("hang-rank*.txt")}
    assert sorted(reports) == [f"hang-rank{rank}.txt" for rank in range(3)]
    assert [re.findall(r"on (node\d)", text)[0] for _, text in sorted(reports.items())] == [
        "node1",
        "node1",
        "node2",
    ]


def test_index_cache_of_each_node_is_its_own(cluster: Cluster, settings: Settings) -> None:
    """Next to copies of the data; and the error of a node that cannot write names it.

    Claim (command-line): each node builds its own index cache; a node that cannot write it is named
    """
    cache = Path(settings["data_path"]).parent / "index-cache"
    done = start(cluster, {**settings, "save": cluster.shared / "cached"})
    assert "2 processes on cpu" in "".join(each.succeed() for each in done)
    entries = [each.output for each in cluster.run_on_all("ls", cache)]
    assert entries[0] == entries[1] != ""
    cluster.nodes[1].run("sh", "-c", f"rm -r {cache}; touch {cache}").succeed()
    done = start(cluster, settings)
    assert [each.code for each in done] == [ExitCode.PEER_LOST, ExitCode.ERROR]
    assert printed_codes(done[1].output) == ["index-cache-not-writable"]
    assert "rank 1 on node2: " in done[1].output
    assert "stopping because rank 1 on node2 failed" in done[0].output


@pytest.mark.parametrize(
    ("fault", "broken", "status"),
    # pdsh returns the highest status: ssh's own is 255.
    [("no deepspeed", 0, 7), ("no sshd", 1, 255)],
)
def test_node_that_does_not_start_ends_the_launch(
    fault: str, broken: int, status: int, cluster: Cluster, settings: Settings
) -> None:
    """Before the ranks of the other node have waited for --distributed-timeout-minutes.

    The command runs on the other node, and the first node is where the ranks meet.

    Claim (command-line): a node that ssh does not reach, or whose Python lacks DeepSpeed, ends
    `deepspeed --hostfile` within seconds; the message names it
    """
    if obstacle := find_obstacle("pdsh"):
        pytest.skip(obstacle)
    (package,) = find_spec("deepspeed").submodule_search_locations or ()
    node = cluster.nodes[broken]
    other = cluster.nodes[1 - broken]
    if fault == "no deepspeed":
        node.run("mount", "-t", "tmpfs", "tmpfs", package).succeed()
    else:
        node.run("pkill", "sshd").succeed()
    done = other.run(*DEEPSPEED, PRETRAIN, *to_flags(settings))
    if fault == "no deepspeed":
        node.run("umount", package).succeed()
    assert done.code == status, done.output
    assert printed_codes(done.output) == ["ssh-ended"]
    assert f"rank {broken} on node{broken + 1} did not start" in done.output
