"""All ways to start a run on two nodes train with the losses of one machine, bit for bit.

Claim (command-line): no process of a run is left on any node; all nodes end when a test is killed
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.cluster import NODES, SLOTS, Cluster, find_obstacle
from tests.e2e.runs import PRETRAIN, PROGRAMS, REPOSITORY, Settings, losses, to_flags
from tests.proofs.cases import with_proofs

Losses = Callable[[str], list[float]]
RunSettings = Callable[[str, Path], Settings]


def documented(program: str) -> str:
    """The command of docs/running/launching.md, with the programs and the slots of the test."""
    page = (REPOSITORY / "docs" / "running" / "launching.md").read_text(encoding="utf-8")
    block = re.search(rf"^```\n({program} .*?pretrain_gpt.py)", page, re.DOTALL | re.MULTILINE)
    assert block is not None
    words = block[1].replace("\\\n", " ").removesuffix("pretrain_gpt.py")
    words = re.sub("--nproc-per-node 8", f"--nproc-per-node {SLOTS}", words)
    return f"{PROGRAMS}/{words}"


RANKS = f"--nodes 2 --ntasks-per-node {SLOTS}"
BIGSCIENCE = f"""{sys.executable} -u -m torch.distributed.run --nproc_per_node {SLOTS} --nnodes 2
    --rdzv_endpoint node1:6000 --rdzv_backend c10d --max_restarts 0 --tee 3"""
"""The launcher of the tutorial of bigscience's Megatron-DeepSpeed."""
DEEPSPEED = f"{PROGRAMS}/deepspeed --hostfile"
ON_FIRST = {
    "deepspeed": ("data", documented("deepspeed")),
    "deepspeed --include": ("tensor", f"{DEEPSPEED} hosts3 --include node1:0,1@node2:0,1"),
    "deepspeed --exclude": ("pipeline", f"{DEEPSPEED} hosts3 --exclude node3"),
    "deepspeed --num_nodes": ("ulysses", f"{DEEPSPEED} hosts3 --num_nodes 2"),
    "deepspeed --launcher slurm": ("data", f"{DEEPSPEED} hosts --launcher slurm"),
    "deepspeed --launcher openmpi": (
        "data",
        f"{DEEPSPEED} hosts --launcher openmpi --launcher_args '-x MASTER_ADDR=node1'",
    ),
    "torch.distributed.run": ("pipeline", f"srun --nodes 2 --ntasks-per-node 1 {BIGSCIENCE}"),
    "srun": ("tensor", f"srun {RANKS} {sys.executable}"),
    "mpirun": (
        "ulysses",
        f"mpirun --host node1:{SLOTS},node2:{SLOTS} --bind-to none "
        f"-x MASTER_ADDR=node1 -x DS_ACCELERATOR -x OMP_NUM_THREADS {sys.executable}",
    ),
}
"""Layout and launcher that one command on the first node starts; there is no node3."""
PROOFS = (
    "deepspeed --exclude",
    "deepspeed --num_nodes",
    "deepspeed --launcher slurm",
    "deepspeed --launcher openmpi",
)
ALLOW_ROOT = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
VARIABLES = {"HF_HOME": "/tmp", "NCCL_DEBUG": "WARN", **ALLOW_ROOT}
"""Of the commands on the first node; .deepspeed_env has only NCCL_DEBUG."""
MISSING = {
    **{
        f"deepspeed{choice}": [("HF_HOME", "node1, node2")]
        for choice in ("", " --include", " --exclude", " --num_nodes")
    },
    "deepspeed --launcher openmpi": [("HF_HOME", "node2")],
    "mpirun": [("HF_HOME", "node2"), ("NCCL_DEBUG", "node2")],
}
"""Variables, and the nodes that lack them, of which a launcher's run warns."""
AGENT = f"{PROGRAMS}/torchrun --nnodes 2 --nproc-per-node {SLOTS}"
ON_BOTH = {
    "torchrun": ("tensor", documented("torchrun").replace("--node-rank 0", "--node-rank {node}")),
    "torchrun c10d": (
        "data",
        f"{AGENT} --rdzv-backend c10d --rdzv-endpoint node1:29400 --rdzv-id run",
    ),
    "deepspeed --no_ssh": (
        "pipeline",
        f"{DEEPSPEED} hosts --no_ssh --node_rank {{node}} --master_addr node1",
    ),
}
"""Layout and launcher, which is started on both nodes."""


@pytest.fixture(scope="module", autouse=True)
def files(cluster: Cluster) -> None:
    """Hostfiles and variables, in the folder of the commands."""
    hosts = "".join(f"{node} slots={SLOTS}\n" for node in NODES)
    (cluster.shared / "hosts").write_text(hosts)
    (cluster.shared / "hosts3").write_text(f"{hosts}node3 slots={SLOTS}\n")
    (cluster.shared / ".deepspeed_env").write_text(
        "DS_ACCELERATOR=cpu\nOMP_NUM_THREADS=1\nNCCL_DEBUG=WARN\n"
    )


@pytest.mark.parametrize("name", with_proofs(ON_FIRST, PROOFS))
def test_one_command_trains_on_both_nodes(
    name: str,
    cluster: Cluster,
    one_machine: Losses,
    run_settings: RunSettings,
    request: pytest.FixtureRequest,
) -> None:
    """Claim (command-line): environment variables of the launching shell that other hosts lack are
    named at the start

    Claim (command-line): on two nodes of two ranks, `deepspeed` with a hostfile over `pdsh` and ssh
    (`--include`, `--exclude`, `--num_nodes`) or `--launcher slurm` or `openmpi`, `srun`, `mpirun`
    and `python -m torch.distributed.run` train with the losses of one machine bit for bit, with
    data-, tensor-, pipeline- and sequence-parallel groups that span nodes
    """
    layout, command = ON_FIRST[name]
    words = shlex.split(command)
    if "srun" in words or "slurm" in words:
        request.getfixturevalue("slurm")
    elif obstacle := find_obstacle("mpirun" if "mpi" in name else "pdsh"):
        pytest.skip(obstacle)
    save = cluster.shared / name
    flags = to_flags(run_settings(layout, save))
    done = cluster.nodes[0].run(*words, PRETRAIN, *flags, environment=VARIABLES)
    assert "4 processes on cpu" in done.succeed()
    assert losses(save) == one_machine(layout)
    assert ("[tensor-parallel-group-spans-hosts]" in done.output) == (layout == "tensor")
    warned = re.findall(r"(HF_HOME|NCCL_DEBUG) \(([^)]*)\)", done.output)
    assert warned == MISSING.get(name, [])


@pytest.mark.parametrize("name", with_proofs(ON_BOTH, ["torchrun c10d", "deepspeed --no_ssh"]))
def test_a_command_on_each_node_trains_on_both(
    name: str, cluster: Cluster, one_machine: Losses, run_settings: RunSettings
) -> None:
    """Claim (command-line): and so do `torchrun` (static and c10d rendezvous) and `deepspeed
    --no_ssh`, started on each node"""
    layout, command = ON_BOTH[name]
    save = cluster.shared / name
    done = cluster.run_on_all(*command.split(), PRETRAIN, *to_flags(run_settings(layout, save)))
    assert "4 processes on cpu" in "".join(each.succeed() for each in done)
    assert losses(save) == one_machine(layout)


@pytest.mark.proof
@pytest.mark.parametrize(("flags", "host"), [((), "node1"), (("--force_multi",), "node2")])
def test_deepspeed_leaves_its_host_for_a_single_one_only_if_forced(
    flags: tuple[str, ...], host: str, cluster: Cluster
) -> None:
    """Claim (command-line): with a single host left, `deepspeed` runs on its own host unless
    `--force_multi` is given"""
    if (obstacle := find_obstacle("pdsh")) is not None:
        pytest.skip(obstacle)
    script = cluster.shared / "host.py"
    script.write_text("import socket; print('runs on', socket.gethostname())")
    command = f"{DEEPSPEED} hosts --include node2:0".split()
    assert f"runs on {host}" in cluster.nodes[0].run(*command, *flags, script).succeed()
