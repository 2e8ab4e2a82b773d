"""All launchers train; the same layout gives the same losses.

In `make test` those that `test_signals.py` and `test_dead_ranks.py` end do so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from megatron_ds.launch.exit_codes import ExitCode
from tests.e2e.runs import (
    LAUNCHERS,
    PRETRAIN,
    PROGRAMS,
    Launcher,
    Settings,
    assert_two_ranks,
    free_port,
    losses,
    to_flags,
)

SCHEDULE: Settings = {"global_batch_size": 8, "train_iters": 3}


@pytest.fixture(scope="module")
def two_ranks(
    launcher: Launcher, base: Settings, tmp_path_factory: pytest.TempPathFactory
) -> list[float]:
    """Losses of a run of two ranks without a launcher."""
    run = tmp_path_factory.mktemp("reference")
    launcher.start({**base, **SCHEDULE, "save": run}, ranks=2).succeed()
    return losses(run)


@pytest.mark.proof
@pytest.mark.parametrize("name", LAUNCHERS)
def test_two_processes(
    name: str, two_ranks: list[float], launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Claim (command-line): and so does `python -m torch.distributed.run`"""
    settings = {**base, **SCHEDULE, "log_interval": 2, "save": tmp_path}
    is_terminal = name != "deepspeed"
    output = launcher.launch(name, settings, terminal=is_terminal)[0].succeed()
    assert_two_ranks(output, settings, short=is_terminal)
    assert losses(tmp_path) == two_ranks


def test_processes_that_a_scheduler_started(
    two_ranks: list[float], launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """The variables of `srun -n 2`, without any of a launcher.

    Claim (command-line): `srun` and `mpirun` start a run; contradicting variables are an error
    """
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_NODEID": "0"}
    step["SLURM_JOB_ID"] = str(os.getpid())  # decides the port
    tasks = [{**step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank} for rank in "01"]
    run = launcher.start({**base, **SCHEDULE, "save": tmp_path}, per_rank=tasks)
    assert "data parallel 2" in run.succeed()
    assert losses(tmp_path) == two_ranks


def test_ranks_of_two_runs_that_meet_do_not_train(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """Two `mpirun -n 2` of one host and port: the first rank of one, the second rank of another.

    Claim (command-line): ranks that were started with different settings, versions or data do not
    train, and say what differs; folders may differ
    """
    task = {"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MASTER_PORT": str(free_port())}
    runs = [
        launcher.start(
            {**base, **SCHEDULE, "lr": rate, "local_checkpoint_dir": tmp_path / number},
            per_rank=[{**task, "PMI_RANK": number, "MPI_LOCALRANKID": number}],
        )
        for number, rate in (("0", 1e-3), ("1", 5e-3))
    ]
    results = [run.wait() for run in runs]
    assert [result.codes for result in results] == [(ExitCode.HOSTS_DIFFER,)] * 2
    output = "".join(result.output for result in results)
    assert output.count("[settings-differ-between-ranks]") == 1, output
    assert "--lr is 0.001 on rank 0 and 0.005 on rank 1" in output
    assert "Traceback" not in output


def test_one_process_without_a_launcher(
    two_ranks: list[float], launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    """One process gives the same losses on the same batches, up to rounding.

    Claim (command-line): plain `python` starts a run of one process
    """
    run = launcher.start({**base, **SCHEDULE, "save": tmp_path}, per_rank=[{}])
    output = run.succeed()
    assert "1 process on cpu" in output
    assert losses(tmp_path) == pytest.approx(two_ranks, rel=1e-5)


def test_slow_first_rank_still_reports_the_problem(launcher: Launcher, base: Settings) -> None:
    """The launcher kills the slow rank as soon as a peer exits with the same problem."""
    delayed = 'if [ "$LOCAL_RANK" = 0 ]; then sleep 1; fi; exec "$@"'
    torchrun = [PROGRAMS / "torchrun", "--nproc_per_node", 2, "--no-python"]
    command = [*torchrun, "--master_port", free_port(), "sh", "-c", delayed, "sh", sys.executable]
    flags = to_flags({**base, "hidden_size": 33, "train_iters": 3})
    result = launcher.command([*command, PRETRAIN, *flags]).wait()
    assert result.output.count("pretrain_gpt.py: 1 problem with the settings") == 1, result.output
    assert "[hidden-size-not-divisible-by-heads]" in result.output
