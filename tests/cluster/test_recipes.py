"""The recipes of examples/clusters: their schemas, and what of them runs on two nodes."""

from __future__ import annotations

import subprocess
import sys
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import psutil
import pytest
import yaml

from tests.cluster.cluster import SLOTS, Cluster, Done, find_obstacle
from tests.cluster.ray_cluster import IS_INSTALLED, RayNodes
from tests.e2e.runs import (
    ENDLESS,
    PRETRAIN,
    REPOSITORY,
    Launcher,
    Run,
    Settings,
    has_trained,
    losses,
    to_flags,
)
from tests.fork_server import DEADLINE

Losses = Callable[[str], list[float]]
RunSettings = Callable[[str, Path], Settings]

RECIPES = REPOSITORY / "examples" / "clusters"
PACKAGES = REPOSITORY / "build" / "recipes"
KEYS = "/home/megatron/.ssh"
"""Where Kubeflow Trainer mounts the keys."""
PROGRAMS = Path(sys.executable).parent
IMPORTS_THE_CLOUDS = ("skylet.autostop_lib", "data.storage", "server.daemons")
"""Modules that SkyPilot's schemas name for lists of values that the recipe has none of."""


def read(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((RECIPES / name).read_text(encoding="utf-8")))


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the packages, from which the test can import."""
    if not PACKAGES.is_dir():
        pytest.skip("needs build/recipes, which `make test-cluster` installs")
    monkeypatch.syspath_prepend(PACKAGES)
    with patch.dict(sys.modules):
        yield PACKAGES


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("kubeflow_torch.yaml", ["TrainJob"]),
        ("kubeflow_deepspeed.yaml", ["TrainingRuntime", "TrainJob"]),
    ],
)
def test_kubeflow_trainer_knows_every_field(name: str, kinds: list[str], packages: Path) -> None:
    """Its models check types, and drop the fields that they do not know.

    Claim (command-line): the recipes for Kubeflow Trainer and SkyPilot are valid by their published
    schemas, and a linter accepts the Dockerfiles
    """
    from kubeflow_trainer_api import models

    documents = read(name)
    assert [document["kind"] for document in documents] == kinds
    for document in documents:
        model = getattr(models, f"TrainerV1alpha1{document['kind']}")
        assert model.from_dict(document).to_dict() == document


def test_skypilot_accepts_its_recipe(packages: Path) -> None:
    """Claim (command-line): the recipes for Kubeflow Trainer and SkyPilot are valid by their
    published schemas, and a linter accepts the Dockerfiles"""
    package = types.ModuleType("sky")
    package.__path__ = [str(packages / "sky")]
    package.__dict__["__version__"] = "0"
    sys.modules["sky"] = package  # whose own import needs the libraries of all clouds
    sys.modules |= {f"sky.{name}": MagicMock() for name in IMPORTS_THE_CLOUDS}
    import jsonschema
    from sky.utils import schemas

    (task,) = read("skypilot.yaml")
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    for mount in task["file_mounts"].values():
        jsonschema.validate(mount, schemas.get_storage_schema())


@pytest.mark.parametrize("name", ["Dockerfile.cpu", "Dockerfile.cuda"])
def test_the_linter_accepts_the_dockerfile(name: str, packages: Path) -> None:
    """Claim (command-line): the recipes for Kubeflow Trainer and SkyPilot are valid by their
    published schemas, and a linter accepts the Dockerfiles"""
    command = [packages / "bin" / "hadolint", RECIPES / name]
    linted = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")


@pytest.fixture
def as_in_the_image(cluster: Cluster) -> None:
    """Lets the shared folder have what the image has in its working directory."""
    for name, target in {"pretrain_gpt.py": PRETRAIN, ".venv": PROGRAMS.parent}.items():
        if not (link := cluster.shared / name).is_symlink():
            link.symlink_to(target)


def check(done: list[Done], save: Path, one_machine: Losses) -> None:
    assert "4 processes on cpu" in "".join(each.succeed() for each in done)
    assert losses(save) == one_machine("data")


@pytest.mark.proof
def test_skypilots_command_trains_on_both_nodes(
    cluster: Cluster, as_in_the_image: None, one_machine: Losses, run_settings: RunSettings
) -> None:
    """Claim (command-line): their commands train on two nodes with the losses of one machine bit
    for bit, given the variables that Kubeflow Trainer and SkyPilot set"""
    save = cluster.shared / "skypilot"
    variables = {
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NUM_GPUS_PER_NODE": str(SLOTS),
        "SKYPILOT_NODE_IPS": "10.99.1.1\n10.99.1.2",
        "FLAGS": " ".join(to_flags(run_settings("data", save))),
    }
    command = f"export SKYPILOT_NODE_RANK={{node}}\n{read('skypilot.yaml')[0]['run']}"
    check(cluster.run_on_all("bash", "-c", command, environment=variables), save, one_machine)


@pytest.mark.proof
def test_the_command_for_kubeflows_torch_runtime_trains_on_both_nodes(
    cluster: Cluster, as_in_the_image: None, one_machine: Losses, run_settings: RunSettings
) -> None:
    """Claim (command-line): their commands train on two nodes with the losses of one machine bit
    for bit, given the variables that Kubeflow Trainer and SkyPilot set"""
    save = cluster.shared / "torch"
    trainer = read("kubeflow_torch.yaml")[0]["spec"]["trainer"]
    variables = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": str(SLOTS),
        "PET_MASTER_ADDR": "node1",
        "PET_MASTER_PORT": "29400",
    }
    words = [*trainer["command"], *to_flags(run_settings("data", save))]
    script = 'export PET_NODE_RANK={node}; exec "$@"'
    done = cluster.run_on_all("sh", "-c", script, "sh", *words, environment=variables)
    check(done, save, one_machine)


@pytest.mark.proof
def test_the_command_for_kubeflows_deepspeed_runtime_trains_on_both_nodes(
    cluster: Cluster, as_in_the_image: None, one_machine: Losses, run_settings: RunSettings
) -> None:
    """With the runtime's own sshd, and a hostfile that does not begin with the launcher.

    Claim (command-line): their commands train on two nodes with the losses of one machine bit for
    bit, given the variables that Kubeflow Trainer and SkyPilot set
    """
    if (obstacle := find_obstacle("mpirun")) is not None:
        pytest.skip(obstacle)
    runtime, job = read("kubeflow_deepspeed.yaml")
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]
    (container,) = node["template"]["spec"]["template"]["spec"]["containers"]
    keys, hosts, save = (cluster.shared / name for name in ("keys", "mpi_hosts", "mpi"))
    keys.mkdir()
    (keys / "id_rsa").symlink_to(cluster.folder / "etc" / "key")
    (keys / "authorized_keys").symlink_to(cluster.folder / "etc" / "key.pub")
    hosts.write_text(f"node2 slots={SLOTS}\nnode1 slots={SLOTS}\n")
    variables = {
        "OMPI_MCA_orte_default_hostfile": str(hosts),
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_set_default_slots": str(SLOTS),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    words = [*job["spec"]["trainer"]["command"], *to_flags(run_settings("data", save))]
    launch = [
        word.replace("-x PATH", "-x PATH -x DS_ACCELERATOR -x OMP_NUM_THREADS") for word in words
    ]
    sshd = [word.replace(KEYS, str(keys)) for word in container["command"]]
    remember = ["sh", "-c", 'echo $$ > sshd.pid; exec "$@"', "sh"]
    server = cluster.nodes[1].start([*remember, *sshd], cluster.new_log())
    try:
        done = cluster.nodes[0].run(*launch, environment=variables)
    finally:
        pid = (cluster.shared / "sshd.pid").read_text().strip()
        cluster.nodes[1].run("kill", pid)
        server.wait()
    check([done], save, one_machine)


@pytest.fixture
def ray_nodes(tmp_path: Path) -> Iterator[RayNodes]:
    if not IS_INSTALLED:
        pytest.skip("Ray is not installed in build/ray (make test-cluster)")
    nodes = RayNodes(tmp_path)
    yield nodes
    nodes.end()


def ray_train(launcher: Launcher, nodes: RayNodes, folder: Path, *flags: str) -> Run:
    options = ["--ray-workers", "4", "--ray-cpus", "0.5", "--ray-no-gpu", "--ray-storage"]
    words = [sys.executable, RECIPES / "ray_train.py", *options, folder / "results", *flags]
    variables = {**nodes.environment, "RAY_ADDRESS": nodes.address, "DS_ACCELERATOR": "cpu"}
    return launcher.command(words, variables)


@pytest.mark.proof
def test_ray_train_trains_on_two_nodes_and_reports_the_rank_that_failed(
    launcher: Launcher,
    ray_nodes: RayNodes,
    one_machine: Losses,
    run_settings: RunSettings,
    tmp_path: Path,
) -> None:
    """Claim (command-line): and so does the recipe for Ray Train on a Ray cluster of two nodes; a
    rank that fails is the error of its command"""
    save = tmp_path / "run"
    flags = to_flags(run_settings("data", save))
    trained = ray_train(launcher, ray_nodes, tmp_path, *flags).succeed()
    failed = ray_train(launcher, ray_nodes, tmp_path, *flags, "--no-such-flag").wait()
    assert "4 processes on cpu" in trained
    assert losses(save) == one_machine("data")
    assert failed.codes == (1,)
    assert "exit status 2" in failed.output


@pytest.mark.proof
def test_ray_train_ends_with_a_killed_worker_and_the_same_command_continues(
    launcher: Launcher, ray_nodes: RayNodes, run_settings: RunSettings, tmp_path: Path
) -> None:
    """Claim (command-line): a killed worker of Ray Train ends the command with status 1 and leaves
    no process; the same command continues from the newest checkpoint with the losses of one machine
    """
    save = tmp_path / "run"
    settings = {**run_settings("data", save), "train_iters": ENDLESS, "save_interval": 1}
    resumable = to_flags({**settings, "load": save})

    def ranks() -> list[psutil.Process]:
        below = (raylet.children(recursive=True) for raylet in ray_nodes.raylets)
        processes = (process for children in below for process in children)
        return [each for each in processes if str(PRETRAIN) in each.cmdline()]

    run = ray_train(launcher, ray_nodes, tmp_path, *resumable)
    run.wait_until(has_trained(save, 3))
    (rank,) = (each for each in ranks() if each.environ().get("RANK") == "2")
    worker = rank.parent()
    assert worker is not None
    worker.kill()
    killed_at = time.monotonic()
    assert run.wait().codes == (1,)
    while ranks():
        assert time.monotonic() < killed_at + DEADLINE
        time.sleep(0.1)
    print(f"everything has ended {time.monotonic() - killed_at:.1f} s after the worker")
    whole = tmp_path / "whole"
    last = ["--exit-interval", str(len(losses(save)) + 2)]
    ray_train(launcher, ray_nodes, tmp_path, *resumable, *last).succeed()
    launcher.start([*to_flags({**settings, "save": whole}), *last], ranks=4).succeed()
    assert losses(save) == losses(whole)
