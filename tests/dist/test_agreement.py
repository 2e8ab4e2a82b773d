"""Agreement of ranks on the end of a run, and means over ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_ds.config import StoppingConfig
from megatron_ds.launch.process.stop_request import StopReason, StopRequest
from megatron_ds.launch.ranks.distributed import create_host_group
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.training.build import mean_over_group
from megatron_ds.training.exit_conditions import ExitConditions, StopDecision
from tests.distributed import run_ranks


def test_a_condition_of_one_rank_stops_all_and_means_are_exact(tmp_path: Path) -> None:
    """Each rank sees a condition in one of the iterations; the decisions are the same."""
    answers = run_ranks(_agree, 2, str(tmp_path))
    assert answers[0] == answers[1]
    reasons, means = answers[0]
    assert reasons == [
        None,
        "exiting program after receiving SIGTERM.",
        f"Detected kill switch at {tmp_path / 'switch'}. Exiting, iteration=3",
    ]
    assert means == [1.5, (0.1 + 1.1) / 2]
    assert mean_over_group([0.1], group=Mesh.single().dp, device=torch.device("cpu")) == [0.1]


def _agree(rank: int, folder: str) -> tuple[list[str | None], list[float]]:
    stop = StopRequest()
    switch = Path(folder, "switch")
    config = StoppingConfig(kill_switch_path=str(switch))
    conditions = ExitConditions(config, 10, stop, create_host_group(timedelta(60)), started_at=0.0)
    reasons = [_message(conditions.after_step(1))]
    if rank == 0:
        stop.request(StopReason.SIGTERM)
    reasons.append(_message(conditions.after_step(2)))
    stop.reason = None
    if rank == 1:
        switch.touch()
    dist.barrier()  # the first rank looks for it
    reasons.append(_message(conditions.after_step(3)))
    group = Mesh.build(1).dp
    values = [1.0 + rank, 0.1 + rank]
    means = mean_over_group(values, group=group, device=torch.device("cpu"))
    return reasons, means


def _message(stop: StopDecision | None) -> str | None:
    return None if stop is None else stop.message
