"""Runs the jobs of a server: several at a time, a token of each per step. Must not know HTTP.

Every tensor-parallel rank runs the same loop. The first rank's loop has the requests: which jobs
start and end before a step is a list of commands that all ranks receive.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from megatron_ds.config.problems import UserError
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.generation.beam import Hypothesis
from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.generation.sequences import Scores, TextSequence
from megatron_ds.inference.generation.tp_group import TpGroupBroken, TpLink
from megatron_ds.inference.serving.service import GenerationJob, Search


class TimedOut(Exception):
    """A job did not end in time."""


class TooManyWaiting(Exception):
    """The queue of waiting jobs is full."""


@dataclass(frozen=True)
class NewToken:
    """A token of a sequence."""

    index: int
    """Number of the sequence in its job."""
    id: int
    logprob: float | None
    top: list[tuple[int, float]]
    prompt_scores: Scores | None = None
    """Scores of the prompt's tokens, sent with the first token if the job requests them."""


@dataclass(frozen=True)
class Finished:
    """All sequences of a job, in order, or what its search found."""

    result: list[TextSequence] | list[Hypothesis]


@dataclass(frozen=True)
class Failed:
    """Reason that a job has no result."""

    error: Exception


Event = NewToken | Finished | Failed


@dataclass(eq=False)
class Ticket:
    """A job on the first rank."""

    key: int
    job: GenerationJob
    listener: Callable[[Event], None]
    """Called by the scheduler's thread."""
    deadline: float
    """Deadline of the job, in seconds of the monotonic clock."""
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    """Time at which the first token was chosen."""


@dataclass
class _Add:
    key: int
    job: GenerationJob


@dataclass
class _Remove:
    key: int


class _Stop:
    pass


@dataclass
class _Work:
    """A job in progress."""

    sequences: list[TextSequence]
    search: Search | None = None


class Scheduler:
    """Runs jobs on all ranks.

    Attributes:
        generated: Number of new tokens so far.
        prompted: Number of tokens of prompts so far.
    """

    def __init__(
        self,
        engine: GenerationEngine,
        start: Callable[[GenerationJob], list[TextSequence] | Search],
        link: TpLink[object],
        *,
        max_waiting: int = 1000,
    ) -> None:
        """
        Args:
            engine: Continues sequences.
            start: The sequences of a job, or its search. Gives the same on all ranks.
            link: Connects the ranks.
            max_waiting: Number of jobs that may wait while all slots of the engine are in use.
        """
        self.generated = 0
        self.prompted = 0
        self._engine = engine
        self._start = start
        self._link = link
        self._max_waiting = max_waiting
        self._works: dict[int, _Work] = {}
        self._owners: dict[int, tuple[int, int]] = {}
        """Key of the job, and index of the sequence in the job, by id of the sequence."""
        self._tickets: dict[int, Ticket] = {}
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._keys = itertools.count()
        self._stopped = False
        self._step_began: float | None = None

    @property
    def running(self) -> int:
        """Number of sequences in the batch."""
        return len(self._engine.running)

    @property
    def waiting(self) -> int:
        """Number of jobs without a token so far."""
        return sum(ticket.started is None for ticket in list(self._tickets.values()))

    @property
    def jobs(self) -> int:
        """Number of jobs that run or wait."""
        return len(self._tickets)

    @property
    def step_s(self) -> float:
        """Seconds since the current step began; 0 while there is no work."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def submit(
        self, job: GenerationJob, listener: Callable[[Event], None], timeout: float
    ) -> Ticket:
        """Adds a job, on the first rank; may be called in any thread.

        Args:
            job: The job.
            listener: Is called by the scheduler's thread, last with a `Finished` or `Failed`.
            timeout: Seconds until the job fails.

        Raises:
            TooManyWaiting: If too many jobs wait.
            Cancelled: If the scheduler has stopped.
        """
        if self._stopped:
            raise Cancelled
        if self.waiting >= self._max_waiting + self._engine.free_slots:
            raise TooManyWaiting
        ticket = Ticket(next(self._keys), job, listener, time.monotonic() + timeout)
        self._tickets[ticket.key] = ticket
        self._inbox.put(_Add(ticket.key, job))
        if self._stopped and self._tickets.pop(ticket.key, None) is not None:
            raise Cancelled  # it has stopped meanwhile, and not seen the ticket
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Ends a job that is no longer wanted; its listener is not called again."""
        if self._tickets.pop(ticket.key, None) is not None:
            self._inbox.put(_Remove(ticket.key))

    def stop(self) -> None:
        """Ends all jobs with `Cancelled`, and `run` on all ranks after the current step."""
        self._stopped = True
        self._fail_tickets(Cancelled())
        self._inbox.put(_Stop())

    def run(self) -> None:
        """Runs jobs until the first rank stops. Collective.

        Raises:
            TpGroupBroken: If the ranks are out of step.
        """
        error: Exception | None = None
        try:
            while True:
                self._step_began = time.monotonic()
                commands = self._commands() if self._link.is_leader else []
                commands = list(self._link.exchange(commands, error))
                if error is not None:
                    self._fail_works(error)
                if any(isinstance(command, _Stop) for command in commands):
                    return
                error = self._step(commands)
        except TpGroupBroken as broken:
            self._stopped = True
            self._fail_tickets(broken)
            raise
        finally:
            self._stopped = True
            self._fail_tickets(Cancelled())

    def _commands(self) -> list[object]:
        """Changes since the last step; waits for one if there is no work."""
        now = time.monotonic()
        commands = list[object]()
        for ticket in [item for item in list(self._tickets.values()) if now > item.deadline]:
            self._end(ticket.key, Failed(TimedOut()))
            commands.append(_Remove(ticket.key))
        if not self._works and not commands:
            self._step_began = None
            commands.append(self._inbox.get())
            self._step_began = time.monotonic()
        while not self._inbox.empty():
            commands.append(self._inbox.get())
        # A job may have ended before it could start.
        return [
            item for item in commands if not isinstance(item, _Add) or item.key in self._tickets
        ]

    def _step(self, commands: Sequence[object]) -> Exception | None:
        """Applies commands, and computes a token of each sequence; the error, if it failed."""
        # All jobs of a step that fails, also those that it does not reach, have failed.
        self._works |= {item.key: _Work([]) for item in commands if isinstance(item, _Add)}
        try:
            for command in commands:
                if isinstance(command, _Add):
                    self._add(command.key, command.job)
                elif isinstance(command, _Remove):
                    self._remove(command.key)
            changed = self._engine.step() if self._engine.is_busy else []
            for sequence in changed:
                self._report(sequence)
            for sequence in changed:
                self._end_if_done(sequence)
            self._advance_search()
        except TpGroupBroken:
            raise
        except Exception as error:
            return error
        return None

    def _add(self, key: int, job: GenerationJob) -> None:
        started = self._start(job)
        if not isinstance(started, list):
            self._works[key] = _Work([], started)
            return
        self._works[key] = _Work(started)
        for index, sequence in enumerate(started):
            self.prompted += sequence.prompt_length
            self._owners[id(sequence)] = key, index
            self._engine.add(sequence)

    def _remove(self, key: int) -> None:
        work = self._works.pop(key, None)
        if work is not None:
            self._engine.remove(work.sequences)
            for sequence in work.sequences:
                del self._owners[id(sequence)]

    def _report(self, sequence: TextSequence) -> None:
        """Notifies the listener of a sequence's job of its new token."""
        key, index = self._owners[id(sequence)]
        if sequence.error is not None or len(sequence.ids) == sequence.prompt_length:
            return
        self.generated += 1
        ticket = self._tickets.get(key)
        if ticket is None:
            return
        ticket.started = ticket.started or time.monotonic()
        if ticket.job.stream:
            scores = sequence.scores
            is_scored = sequence.config.logprobs
            logprob, top = (scores.logprobs[-1], scores.top[-1]) if is_scored else (None, [])
            prompt = None
            if sequence.config.prompt_logprobs and len(sequence.new_ids) == 1:
                prompt = Scores(scores.logprobs[:-1], scores.top[:-1])
            ticket.listener(NewToken(index, sequence.ids[-1], logprob, top, prompt))

    def _end_if_done(self, sequence: TextSequence) -> None:
        """Ends a sequence's job if its last sequence is done, or one has failed."""
        owner = self._owners.get(id(sequence))
        if owner is None:  # its job has ended
            return
        key, _ = owner
        sequences = self._works[key].sequences
        if sequence.error is not None:
            result: Event = Failed(sequence.error)
        elif all(other.is_done for other in sequences):
            result = Finished(sequences)
        else:
            return
        self._remove(key)
        self._end(key, result)

    def _advance_search(self) -> None:
        """A step of the oldest search."""
        searches = [(key, work.search) for key, work in self._works.items() if work.search]
        if not searches:
            return
        key, search = searches[0]
        ticket = self._tickets.get(key)
        if ticket is not None:
            ticket.started = ticket.started or time.monotonic()
        try:
            next(search)
        except StopIteration as end:
            result: Event = Finished(end.value)
        except UserError as error:  # of the model, on all ranks
            result = Failed(error)
        else:
            return
        self._remove(key)
        self._end(key, result)

    def _end(self, key: int, result: Event) -> None:
        ticket = self._tickets.pop(key, None)
        if ticket is not None:
            ticket.listener(result)

    def _fail_works(self, error: Exception) -> None:
        """Ends all jobs that have started."""
        for key in list(self._works):
            self._remove(key)
            self._end(key, Failed(error))

    def _fail_tickets(self, error: Exception) -> None:
        """Ends all jobs."""
        for key in list(self._tickets):
            self._end(key, Failed(error))
