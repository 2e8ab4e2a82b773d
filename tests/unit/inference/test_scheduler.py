"""Jobs join, end and fail without harm to others."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.generation.beam import BeamSearchConfig, Hypothesis
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import TextSequence
from megatron_ds.inference.generation.tp_group import TpGroupBroken
from megatron_ds.inference.serving.scheduler import (
    Event,
    Failed,
    Finished,
    Scheduler,
    Search,
    TimedOut,
    TooManyWaiting,
)
from megatron_ds.inference.serving.service import GenerationJob, TextGenerationService
from megatron_ds.model.gpt import GPTModel
from tests.unit.inference.models import EOD, model_of
from tests.unit.inference.schedulers import (
    DEADLINE,
    ByteTokenizer,
    LocalLink,
    Running,
    running,
    wait_until,
)

CAPACITY = 40
GREEDY = SamplingParams(greedy=True)


@pytest.fixture(scope="module")
def model() -> GPTModel:
    return model_of("rope")


@pytest.fixture(scope="module")
def service(model: GPTModel) -> TextGenerationService:
    return TextGenerationService(model, ByteTokenizer(), CAPACITY)  # type: ignore[arg-type]


@pytest.fixture
def server(service: TextGenerationService) -> Iterator[Running]:
    with running(engine_of(service), service.start, max_waiting=1) as server:
        yield server


def engine_of(service: TextGenerationService, slots: int = 2) -> GenerationEngine:
    return GenerationEngine(service.model, slots=slots, capacity=CAPACITY)


def job(*prompts: list[int], new: int = 12, **more: Any) -> GenerationJob:
    return GenerationJob(list(prompts), new, GREEDY, **more)


def search(prompt: list[int], new: int = 5) -> GenerationJob:
    return GenerationJob([prompt], new, GREEDY, beam=BeamSearchConfig(new, 2, EOD))


def ids_of(end: Finished | Failed) -> list[list[int]]:
    assert isinstance(end, Finished), end
    return [each.ids for each in end.result]


def error_of(end: Finished | Failed) -> Exception:
    assert isinstance(end, Failed), end
    return end.error


def alone(service: TextGenerationService, asked: GenerationJob) -> list[list[int]]:
    """What a job gives that runs by itself."""
    with running(engine_of(service, slots=9), service.start) as server:
        return ids_of(server.result(asked))


def works(server: Running) -> int:
    """What the scheduler computes; jobs without a listener as well."""
    return len(server.scheduler._works)


def test_jobs_join_and_leave(server: Running, service: TextGenerationService) -> None:
    with server.hold():
        _, first = server.submit(job([1, 2], [3], [4], stream=True))
        server.gate.release(3)
        wait_until(lambda: len(first.tokens) == 6)
        _, second = server.submit(job([5], new=2))
        assert server.scheduler.running == 2
        assert server.scheduler.jobs == 2
        assert server.scheduler.waiting == 1

    assert ids_of(first.end) == alone(service, job([1, 2], [3], [4]))
    assert ids_of(second.end) == alone(service, job([5], new=2))
    assert second.tokens == []
    assert (server.scheduler.jobs, server.scheduler.running, works(server)) == (0, 0, 0)
    assert server.scheduler.prompted == 5
    for number, prompt in enumerate(([1, 2], [3], [4])):
        tokens = [token.id for token in first.tokens if token.index == number]
        assert [[*prompt, *tokens]] == alone(service, job(prompt))
    assert server.scheduler.generated == len(first.tokens) + 2


def test_scores_are_reported_with_tokens(server: Running) -> None:
    _, listener = server.submit(job([1, 2], new=5, stream=True, logprobs=True, top_n=2))
    end = listener.end
    assert isinstance(end, Finished)
    (sequence,) = end.result
    assert isinstance(sequence, TextSequence)
    assert [token.logprob for token in listener.tokens] == sequence.scores.logprobs
    assert [token.top for token in listener.tokens] == sequence.scores.top
    assert sequence.scores.logprobs


def test_prompts_are_scored_without_tokens(server: Running) -> None:
    _, listener = server.submit(job([1, 2, 3], new=0, prompt_logprobs=True, stream=True))
    assert ids_of(listener.end) == [[1, 2, 3]]
    assert (listener.tokens, server.scheduler.generated) == ([], 0)


def test_a_cancelled_job_frees_its_slots(server: Running, service: TextGenerationService) -> None:
    """Claim (serving): many threads get from the server's scheduler what single requests get; a job
    that fails, is cancelled or late harms no other"""
    with server.hold():
        ticket, unwanted = server.submit(job([1], [2], new=30, stream=True))
        server.gate.release(1)
        wait_until(lambda: len(unwanted.tokens) == 2)
        server.scheduler.cancel(ticket)
        _, after = server.submit(job([7]))
    assert ids_of(after.end) == alone(service, job([7]))
    assert unwanted.ends.empty()
    assert len(unwanted.tokens) <= 4  # those of the step in progress
    server.scheduler.cancel(ticket)
    wait_until(lambda: works(server) == 0)


def test_a_job_is_cancelled_before_it_starts(server: Running) -> None:
    with server.hold():
        _, first = server.submit(job([1], new=3))
        wait_until(lambda: server.scheduler.running + len(server.engine.waiting) == 1)
        ticket, unwanted = server.submit(job([2], new=30))
        server.scheduler.cancel(ticket)
    assert ids_of(first.end)
    wait_until(lambda: works(server) == 0)
    assert server.scheduler.generated == 3
    assert unwanted.ends.empty()


def test_a_job_fails_at_its_deadline(server: Running) -> None:
    with server.hold():
        _, late = server.submit(job([1], new=30), timeout=0.05)
        _, good = server.submit(job([2], new=30))
        time.sleep(0.1)
    assert isinstance(error_of(late.end), TimedOut)
    assert len(ids_of(good.end)[0]) == 31
    assert server.scheduler.generated < 40


def test_a_job_that_ends_before_it_starts_is_not_computed(server: Running) -> None:
    with server.hold():
        _, first = server.submit(job([1], new=3))
        wait_until(lambda: works(server) == 1)
        _, late = server.submit(job([2], new=30), timeout=0.01)
        time.sleep(0.05)
    assert isinstance(error_of(late.end), TimedOut)
    assert ids_of(first.end)
    wait_until(lambda: works(server) == 0)
    assert server.scheduler.generated == 3


@pytest.mark.parametrize("limit", [0, 1])
def test_jobs_may_wait_only_for_slots(service: TextGenerationService, limit: int) -> None:
    with running(engine_of(service), service.start, max_waiting=limit) as server:
        with server.hold():
            listeners = [server.submit(job([1], [2]))[1]]
            server.gate.release(1)
            wait_until(lambda: server.scheduler.generated == 2)
            listeners += [server.submit(job([3]))[1] for _ in range(limit)]
            for _ in range(2):
                with pytest.raises(TooManyWaiting):
                    server.submit(job([4]))
        assert all(ids_of(listener.end) for listener in listeners)
        assert ids_of(server.result(job([4])))


def failing(service: TextGenerationService) -> Any:
    """Starts jobs, but none whose prompt starts with 66."""

    def start(asked: GenerationJob) -> list[TextSequence] | Search:
        if asked.prompts[0][0] == 66:
            raise ZeroDivisionError("66")
        return service.start(asked)

    return start


def test_a_failed_step_fails_its_jobs_and_no_later_ones(service: TextGenerationService) -> None:
    with running(engine_of(service), failing(service)) as server:
        for _ in range(2):
            with server.hold():
                _, before = server.submit(job([1], new=30))
                server.gate.release(1)
                wait_until(lambda: server.engine.running != [])
                _, bad = server.submit(job([66]))
                _, same_step = server.submit(job([2]))
            for listener in (before, bad, same_step):
                assert isinstance(error_of(listener.end), ZeroDivisionError)
            assert server.scheduler.jobs == 0
            assert ids_of(server.result(job([3]))) == alone(service, job([3]))


def test_a_model_that_fails_leaves_nothing_behind(
    server: Running, service: TextGenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While prompts are fed, and while tokens are chosen."""
    expected = alone(service, job([3], [4]))
    for name, after in (("forward", 0), ("forward", 3), ("logits", 0), ("logits", 4)):
        calls = [0]
        method = getattr(service.model, name)

        def fail(*args: Any, _calls: Any = calls, _method: Any = method, **more: Any) -> Any:
            _calls[0] += 1
            if _calls[0] > after:  # noqa: B023
                raise RuntimeError("no memory")
            return _method(*args, **more)

        with monkeypatch.context() as patch:
            patch.setattr(service.model, name, fail)
            with server.hold():
                listeners = [server.submit(job([1, 2, 3], [7]))[1], server.submit(job([5]))[1]]
            errors = [error_of(listener.end) for listener in listeners]
        assert [str(error) for error in errors] == ["no memory"] * 2
        assert (server.engine.running, list(server.engine.waiting)) == ([], [])
        assert ids_of(server.result(job([3], [4]))) == expected


def test_a_failed_start_is_told_without_other_work(service: TextGenerationService) -> None:
    with running(engine_of(service), failing(service)) as server:
        assert isinstance(error_of(server.result(job([66]))), ZeroDivisionError)


def test_jobs_that_come_after_a_failed_step_run(
    service: TextGenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the step and the end of its jobs."""
    link = LocalLink()
    late = list[Any]()
    engine = engine_of(service)
    server = Running(engine, failing(service))
    exchange = link.exchange

    def slow(commands: Sequence[object], error: Exception | None = None) -> Sequence[object]:
        if error is not None and not late:
            late.append(server.submit(job([5]))[1])  # after the commands were collected
        return exchange(commands, error)

    monkeypatch.setattr(link, "exchange", slow)
    server.scheduler._link = link  # type: ignore[assignment]
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(server.scheduler.run)
        try:
            assert isinstance(error_of(server.result(job([66]))), ZeroDivisionError)
            assert ids_of(late[0].end) == alone(service, job([5]))
        finally:
            server.scheduler.stop()
        done.result(DEADLINE)


def test_a_sequence_that_fails_fails_only_its_job(
    server: Running, service: TextGenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (serving): many threads get from the server's scheduler what single requests get; a job
    that fails, is cancelled or late harms no other"""
    append = TextSequence.append

    def fail(sequence: TextSequence, token: int) -> None:
        append(sequence, token)
        if sequence.ids[0] == 9 and len(sequence.ids) == 5:
            sequence.error = user_error("logits-not-finite")

    expected = alone(service, job([1]))
    monkeypatch.setattr(TextSequence, "append", fail)
    with server.hold():
        _, good = server.submit(job([1]))
        _, bad = server.submit(job([9], [2]))
        server.gate.release(1)
        wait_until(lambda: server.scheduler.generated > 0)
    assert isinstance(error_of(bad.end), UserError)
    assert ids_of(good.end) == expected
    wait_until(lambda: works(server) == 0)
    assert server.engine.running == []


def test_a_search_takes_turns_with_sequences(
    server: Running, service: TextGenerationService
) -> None:
    ended: list[str] = []
    asked = {
        "search": search([1, 2]), "text": job([3], new=3), "second": search([4]),
        "long": job([5], new=30),
    }  # fmt: skip
    ends: dict[str, Finished | Failed] = {}

    def listen(name: str, event: Event) -> None:
        assert isinstance(event, (Finished, Failed))
        ended.append(name)
        ends[name] = event

    with server.hold():
        for name, each in asked.items():
            server.scheduler._max_waiting = 9
            server.scheduler.submit(each, lambda event, name=name: listen(name, event), DEADLINE)
    wait_until(lambda: len(ended) == 4)
    assert ended == ["text", "search", "second", "long"]
    for name, each in asked.items():
        assert ids_of(ends[name]) == alone(service, each)
    end = ends["search"]
    assert isinstance(end, Finished)
    assert all(isinstance(each, Hypothesis) for each in end.result)


def test_a_search_whose_model_is_broken_fails_alone(
    server: Running, service: TextGenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(asked: GenerationJob) -> Any:
        def steps() -> Iterator[None]:
            yield
            raise user_error("logits-not-finite")

        return steps() if asked.beam else service.start(asked)

    monkeypatch.setattr(server.scheduler, "_start", start)
    with server.hold():
        _, good = server.submit(job([3]))
        _, bad = server.submit(search([1]))
    assert isinstance(error_of(bad.end), UserError)
    assert ids_of(good.end) == alone(service, job([3]))


def test_a_stop_cancels_everything(service: TextGenerationService) -> None:
    with running(engine_of(service), service.start) as server:
        wait_until(lambda: server.scheduler.step_s == 0)  # it waits for work
        with server.hold():
            jobs = (job([1], new=30), job([2], [3], [4], new=30), search([5], new=30))
            listeners = [server.submit(each)[1] for each in jobs]
            server.gate.release(1)
            wait_until(lambda: server.engine.running != [])
            wait_until(lambda: server.scheduler.step_s > 0.01)  # a step is held
            server.scheduler.stop()
            # Before the step has ended.
            assert all(isinstance(error_of(each.end), Cancelled) for each in listeners[:1])
            listeners = listeners[1:]
        assert all(isinstance(error_of(each.end), Cancelled) for each in listeners)
        wait_until(lambda: server.scheduler._stopped)
        with pytest.raises(Cancelled):
            server.submit(job([1]))


def test_a_job_that_comes_while_the_scheduler_stops_is_cancelled(
    service: TextGenerationService, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler: Scheduler = Scheduler(
        engine_of(service),
        service.start,
        LocalLink(),  # type: ignore[arg-type]
    )
    put = scheduler._inbox.put

    class Inbox:
        def put(self, command: object) -> None:
            put(command)
            scheduler._stopped = True  # as by the other thread

    monkeypatch.setattr(scheduler, "_inbox", Inbox())
    with pytest.raises(Cancelled):
        scheduler.submit(job([1]), lambda event: None, DEADLINE)
    assert scheduler.jobs == 0


def test_ranks_out_of_step_fail_everything(service: TextGenerationService) -> None:
    class Broken(LocalLink):
        def exchange(
            self, commands: Sequence[object], error: Exception | None = None
        ) -> Sequence[object]:
            raise TpGroupBroken("rank 1 is lost")

    server = Running(engine_of(service), service.start)
    server.scheduler._link = Broken()  # type: ignore[assignment]
    _, listener = server.submit(job([1]))
    with pytest.raises(TpGroupBroken):
        server.scheduler.run()
    assert isinstance(error_of(listener.end), TpGroupBroken)
    with pytest.raises(Cancelled):
        server.submit(job([1]))


def test_many_threads_get_what_single_requests_get(service: TextGenerationService) -> None:
    """Claim (serving): many threads get from the server's scheduler what single requests get; a job
    that fails, is cancelled or late harms no other"""
    sampled = SamplingParams(temperature=2.0, seed=3)
    asked = [
        *(job([number, number + 1], new=3 + 2 * number) for number in range(8)),
        *(GenerationJob([[number], [7]], 9, sampled, samples=2) for number in range(3)),
        search([1, 2, 3]),
    ]
    expected = [alone(service, each) for each in asked]
    with (
        running(engine_of(service, slots=4), service.start) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        ends = list(pool.map(server.result, asked * 3))
    assert [ids_of(end) for end in ends] == expected * 3
