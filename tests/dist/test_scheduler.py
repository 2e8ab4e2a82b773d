"""The scheduler on two ranks: they stay in step, or the server ends."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_ds.inference.generation import tp_group
from megatron_ds.inference.generation.beam import BeamSearchConfig
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.tp_group import TpGroupBroken, TpLink
from megatron_ds.inference.serving.scheduler import Failed, Finished, Scheduler
from megatron_ds.inference.serving.service import GenerationJob, TextGenerationService
from megatron_ds.parallel.mesh import Mesh
from tests.distributed import run_ranks
from tests.unit.inference.models import EOD, model_of
from tests.unit.inference.schedulers import ByteTokenizer, Listener, LocalLink

CAPACITY = 40
HOT = SamplingParams(temperature=3.0, seed=2)
GREEDY = SamplingParams(greedy=True)
BAD = 66
"""First id of the prompts that cannot be started."""
JOBS = [
    GenerationJob([[1, 2], [3]], 12, GREEDY, samples=2),
    GenerationJob([[BAD]], 3, GREEDY),
    GenerationJob([[4]], 20, HOT, samples=3),
    GenerationJob([[5, 6]], 4, GREEDY, beam=BeamSearchConfig(4, 2, EOD)),
    GenerationJob([list(range(20))], 9, HOT),
]


def serve(
    mesh: Mesh, link: Any, leads: bool, change: Callable[[Scheduler], None] | None = None
) -> list[Any]:
    """The ids of each job one after the other, and of all at once, or the name of its error."""
    service = TextGenerationService(model_of("rope", mesh), ByteTokenizer(), CAPACITY)  # type: ignore[arg-type]

    def start(job: GenerationJob) -> Any:
        if job.prompts[0][0] == BAD:
            raise ZeroDivisionError(f"on rank {dist.get_rank()}")
        return service.start(job)

    engine = GenerationEngine(service.model, slots=3, capacity=CAPACITY)
    scheduler: Scheduler = Scheduler(engine, start, link)
    if change is not None:
        change(scheduler)
    found: list[Any] = []

    def ask() -> None:
        def submit(job: GenerationJob) -> Listener:
            listener = Listener()
            scheduler.submit(job, listener, 60)
            return listener

        def result(end: Finished | Failed) -> Any:
            if isinstance(end, Failed):
                return type(end.error).__name__
            return [each.ids for each in end.result]

        found.extend(result(submit(job).end) for job in JOBS)
        good = [submit(job) for job in JOBS if job.prompts[0][0] != BAD]
        found.extend(result(listener.end) for listener in good)
        scheduler.stop()

    asking = threading.Thread(target=ask)
    if leads:
        asking.start()
    try:
        scheduler.run()
    finally:
        if leads and change is None:
            asking.join()
    return found


def fail_in_step(scheduler: Scheduler) -> None:
    """Fails after the collectives of the third step."""
    engine = scheduler._engine
    steps = [0]
    step = engine.step

    def failing() -> Any:
        changed = step()
        steps[0] += 1
        if steps[0] == 3:
            raise ValueError("only here")
        return changed

    engine.step = failing  # type: ignore[method-assign]


def serve_all(rank: int) -> dict[str, Any]:
    pair = Mesh.build(tp_size=2)
    leads = rank == 0
    found: dict[str, Any] = {"pair": serve(pair, TpLink(), leads)}
    if leads:
        found["alone"] = serve(Mesh.single(), LocalLink(), True)
    for failing_rank in (0, 1):
        link: TpLink[Any] = TpLink()
        listener = Listener()

        def change(
            scheduler: Scheduler, failing_rank: int = failing_rank, mine: Listener = listener
        ) -> None:
            if leads:
                scheduler.submit(JOBS[0], mine, 60)
            if rank == failing_rank:
                fail_in_step(scheduler)

        try:
            serve(pair, link, False, change)
        except TpGroupBroken as error:
            found[f"fails on {failing_rank}"] = str(error)
        if leads:
            end = listener.end
            found[f"told of {failing_rank}"] = type(getattr(end, "error", None)).__name__
    # The others may wait for a rank that failed alone, in the model.
    tp_group.STEP_TIMEOUT = timedelta(seconds=2)
    for lone_rank, error in ((0, None), (1, ValueError("only here"))):
        abandoned: TpLink[Any] = TpLink()
        abandoned.exchange(())
        if rank == lone_rank:
            try:
                abandoned.exchange((), error)
            except TpGroupBroken as broken:
                found["abandoned"] = repr(broken)
            # The rank can end, though the other one, which waits for it, does not.
            dist.destroy_process_group(abandoned._group)
            del abandoned
            gc.collect()
        dist.barrier()
    return found


def test_two_ranks_stay_in_step_or_end() -> None:
    """Claim (serving): ranks of a server stay in step or end"""
    first, second = run_ranks(serve_all, 2, timeout=120)

    assert first["pair"] == first["alone"]
    assert first["pair"][1] == "ZeroDivisionError"
    assert [each for each in first["pair"][:5] if each != "ZeroDivisionError"] == first["pair"][5:]
    assert second["pair"] == []
    for failing_rank in (0, 1):
        messages = [each[f"fails on {failing_rank}"] for each in (first, second)]
        assert ["only here" in message for message in messages] == [
            rank == failing_rank for rank in (0, 1)
        ]
        assert all("others differ" in message for message in messages)
        assert first[f"told of {failing_rank}"] == "TpGroupBroken"
    assert "lost" in first["abandoned"]
    assert "lost" in second["abandoned"]
