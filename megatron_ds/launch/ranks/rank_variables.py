"""Finds this process's ranks in the variables of launchers, MPI and Slurm.

Pure functions of an environment: they read no files and change nothing. torch and DeepSpeed need
RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which `torchrun` and `deepspeed` set;
`mpirun` and `srun` set variables of their own.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping, Sequence

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.dataclass import dataclass

Environment = Mapping[str, str]

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
LOCAL_RANK_VARIABLES = (
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PMI_LOCAL_RANK",
    "SLURM_LOCALID",
)
AGENT_VARIABLES = ("TORCHELASTIC_RUN_ID", "CROSS_RANK")
"""Set by the agents of `torchrun` and `deepspeed`, which start the ranks of a host."""
AGENT_COUNT_VARIABLES = ("GROUP_WORLD_SIZE", "CROSS_SIZE")
"""Variables of `torchrun` and `deepspeed` with the number of agents in one training run."""
SUFFIXES = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
MPI_VARIABLES = {
    "Open MPI": [f"OMPI_COMM_WORLD_{suffix}" for suffix in SUFFIXES],
    "MVAPICH": [f"MV2_COMM_WORLD_{suffix}" for suffix in SUFFIXES],
    "MPICH": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],  # and Intel MPI
    "Cray PALS": [f"PMI_{suffix}" for suffix in SUFFIXES],
}
"""Variables of rank, size, local rank and local size."""
LONE_RANK_VARIABLES = ("PMIX_RANK", "PMI_RANK")
"""Show that an MPI started this process, but not how many there are."""

DEFAULT_PORT = 29500
"""Port of the rendezvous, as in torch and DeepSpeed, where nothing identifies the job."""
PORTS = range(10_000, 30_000)
"""Ports for a rendezvous, below those that systems hand out to connections."""


@dataclass(frozen=True)
class Task:
    """This process among those that an MPI or Slurm started together.

    Attributes:
        program: Who started it.
        values: Rank, number of processes and rank on this host, as `RANK_VARIABLES`.
        variables: The variables that they were read from.
        local_size: Number of processes on this host; None if unknown.
        first_host: Host of rank 0; None if unknown.
        job: Identifies the job: equal in its processes. None if unknown.
    """

    program: str
    values: Mapping[str, int]
    variables: Mapping[str, str]
    local_size: int | None
    first_host: str | None
    job: str | None

    @property
    def size(self) -> int:
        return self.values["WORLD_SIZE"]


def find_ranks(env: Environment) -> dict[str, str]:
    """The variables of torch and DeepSpeed that the environment lacks.

    Complete variables of a launcher have priority: it may have been started by `srun` or `mpirun`,
    once per host. MPI has priority over Slurm, whose tasks may be the daemons of an `mpirun`.

    Args:
        env: Environment of this process.

    Returns:
        Variables to set. Empty if a launcher set them, or for a process of its own.

    Raises:
        UserError: If variables are missing, or contradict each other, so that several processes
            would train by themselves.
    """
    values = {name: _number(env, name) for name in RANK_VARIABLES if name in env}
    is_complete = len(values) == len(RANK_VARIABLES)
    task = _mpi_task(env) or _slurm_task(env)
    if task is None and not is_complete:
        _require_single_process(env)
    if task is None or task.size == 1:
        return {}
    if is_complete and _is_started_by_tasks(env, task, values["WORLD_SIZE"]):
        return {}
    for name in ("WORLD_SIZE", "RANK") if is_complete else ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        if values.get(name, task.values[name]) != task.values[name]:
            raise _contradiction(env, name, task.variables[name])
    variables = {name: str(value) for name, value in task.values.items()}
    variables |= _rendezvous(env, task)
    if task.local_size is not None:
        variables["LOCAL_WORLD_SIZE"] = str(task.local_size)
    return {name: value for name, value in variables.items() if name not in env}


def _is_started_by_tasks(env: Environment, task: Task, size: int) -> bool:
    """Whether launchers in the tasks, rather than MPI or Slurm, started the ranks of a run.

    Raises:
        UserError: If each task has started a training run of its own.
    """
    if task.program == "Slurm" and "SLURM_PTY_PORT" in env:
        return True  # an interactive shell, whatever it starts
    is_agent = any(name in env for name in AGENT_VARIABLES)
    for name in AGENT_COUNT_VARIABLES:
        if is_agent and name in env and size >= task.size > _number(env, name):
            raise _contradiction(env, name, task.variables["WORLD_SIZE"])
    return size > task.size or (is_agent and size == task.size)


def count_unused_tasks(env: Environment) -> int:
    """Tasks of a Slurm job, in a process that was started in its script or shell without srun.

    0 if there is one task, or if the process was started by srun, MPI or a launcher.
    """
    tasks = _number(env, "SLURM_NTASKS") if "SLURM_NTASKS" in env else 1
    by_others = any(name in env for name in (*RANK_VARIABLES, "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
    if tasks == 1 or by_others or _is_single_step(env) or _slurm_task(env) is not None:
        return 0
    return tasks


def first_host(node_list: str) -> str:
    """The first host of a list as Slurm writes it: `node[001-003,7],gpu-[1-2]-x` is `node001`."""
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", node_list)
    assert first is not None
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0])


def _require_single_process(env: Environment) -> None:
    """Raises an error if variables that are not complete show that there are other processes."""
    for name in LONE_RANK_VARIABLES:
        if name in env and env.get("PMI_SIZE") != "1" and not _is_single_step(env):
            raise _incomplete(env, name, RANK_VARIABLES)
    if env.get("RANK", "0") != "0" and "WORLD_SIZE" not in env:
        raise _incomplete(env, "RANK", RANK_VARIABLES)


def _mpi_task(env: Environment) -> Task | None:
    """Rank and size that the MPI launcher assigned to the process; None without MPI."""
    for program, names in MPI_VARIABLES.items():
        present = [name for name in names[:3] if name in env]
        if len(present) == 3:
            break
        if present and program in ("Open MPI", "MVAPICH"):
            raise _incomplete(env, present[0], names[:3])
    else:
        return None
    local_size = _number(env, names[3]) if names[3] in env else None
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or env.get("SLURM_JOB_ID")
    return _task(env, program, names[:3], local_size, env.get("SLURM_JOB_NODELIST"), job)


def _slurm_task(env: Environment) -> Task | None:
    """Rank and size that srun assigned to the process; None without srun, or for a single task."""
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    names = ("SLURM_PROCID", size_name, "SLURM_LOCALID")
    if env.get(size_name, "1") == "1" or _is_outside_steps(env):
        return None
    if not all(name in env for name in names):
        raise _incomplete(env, size_name, names)
    for name, other in (("PMI_RANK", names[0]), ("PMI_SIZE", names[1])):  # srun --mpi=pmi2
        if name in env and env[name] != env[other]:
            raise _contradiction(env, name, other)
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    job = f"{env['SLURM_JOB_ID']}.{env.get('SLURM_STEP_ID')}" if "SLURM_JOB_ID" in env else None
    return _task(env, "Slurm", names, _slurm_local_size(env), nodes, job)


def _task(
    env: Environment,
    program: str,
    names: Sequence[str],
    local_size: int | None,
    nodes: str | None,
    job: str | None,
) -> Task:
    """The process whose rank, number of processes and local rank are in some variables."""
    variables = dict(zip(RANK_VARIABLES, names, strict=True))
    values = {key: _number(env, name) for key, name in variables.items()}
    if values["RANK"] >= values["WORLD_SIZE"]:
        raise _contradiction(env, *names[:2])
    host = None if nodes is None else first_host(nodes)
    return Task(program, values, variables, local_size, host, job)


def _is_single_step(env: Environment) -> bool:
    """Whether srun started one task, such as the shell of an interactive job."""
    return env.get("SLURM_STEP_NUM_TASKS") == "1"


def _is_outside_steps(env: Environment) -> bool:
    """Whether this is a process of a job's batch script, or of salloc's shell.

    Such a process has the job's number of tasks. A job that was submitted within a step of another
    one inherits the variables of that step, but lists itself as the only task of its host.
    """
    if "SLURM_JOB_ID" not in env:
        return False
    if "SLURM_STEP_NUM_TASKS" not in env:
        in_script = env.get("SLURM_PROCID") == "0" and "SLURM_TASK_PID" in env
        return in_script or "SLURM_PROCID" not in env
    local_size = _slurm_local_size(env)
    return env.get("SLURM_GTIDS") == "0" and local_size is not None and local_size > 1


def _slurm_local_size(env: Environment) -> int | None:
    """Tasks on this node: entry SLURM_NODEID of a list such as `2(x3),1`; None if unknown."""
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if counts is None or "SLURM_NODEID" not in env:
        return None
    expanded: list[int] = []
    for tasks, nodes in re.findall(r"(\d+)(?:\(x(\d+)\))?", counts):
        expanded += [int(tasks)] * int(nodes or 1)
    node = _number(env, "SLURM_NODEID")
    return expanded[node] if node < len(expanded) else None


def _rendezvous(env: Environment, task: Task) -> dict[str, str]:
    """Rank 0's address and port, at which the processes of a task meet."""
    host = env.get("MASTER_ADDR")
    if host is None:
        host = "127.0.0.1" if task.local_size == task.size else task.first_host
    if host is None:
        export = "srun --export=ALL," if task.program == "Slurm" else "mpirun -x "
        program = task.program
        size = task.size
        raise user_error("rendezvous-host-unknown", program=program, size=size, export=export)
    here = env.get("SLURMD_NODENAME", host)
    if task.values["RANK"] == 0 and host == task.first_host != here and "MASTER_ADDR" not in env:
        raise user_error("first-rank-not-on-first-host", here=here, host=host)
    port = DEFAULT_PORT if task.job is None else PORTS[zlib.crc32(task.job.encode()) % len(PORTS)]
    return {"MASTER_ADDR": host, "MASTER_PORT": str(port)}


def _number(env: Environment, name: str) -> int:
    try:
        return int(env[name])
    except ValueError:
        raise user_error("rank-not-a-number", name=name, value=env[name]) from None


def _incomplete(env: Environment, present: str, names: Sequence[str]) -> UserError:
    missing = ", ".join(name for name in names if name not in env)
    return user_error("incomplete-launcher-environment", given=present, missing=missing)


def _contradiction(env: Environment, first: str, second: str) -> UserError:
    return user_error(
        "contradictory-launcher-environment",
        first=f"{first}={env[first]}",
        second=f"{second}={env[second]}",
        name=first,
    )
