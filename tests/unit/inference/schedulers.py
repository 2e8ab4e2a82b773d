"""A scheduler on one process, its jobs in threads, and a tokenizer of bytes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from megatron_ds.inference.generation.engine import GenerationEngine
from megatron_ds.inference.serving.scheduler import (
    Event,
    Failed,
    Finished,
    NewToken,
    Scheduler,
    Ticket,
)
from megatron_ds.inference.serving.service import GenerationJob
from megatron_ds.tokenizer import Tokenizer
from tests.unit.inference.models import EOD, VOCAB

DEADLINE = 60.0
"""Seconds after which a test fails rather than hangs."""
PARTS = [
    *(bytes([code]) for code in range(32, 92)),
    *(bytes([byte]) for byte in "é€😀\n".encode()),
    *(text.encode() for text in ("ab", "the", "é", "X\u20ac", "\n\n")),
]
"""The first tokens' bytes: characters, bytes of longer characters, and several characters."""


class ByteTokenizer(Tokenizer):
    """Tokens of bytes, so that a character may have several tokens."""

    vocab_size = VOCAB
    eod = EOD

    def encode(self, text: str) -> list[int]:
        known = {part[0]: number for number, part in enumerate(PARTS) if len(part) == 1}
        if missing := set(text.encode()) - known.keys():
            raise ValueError(f"there are no tokens of {missing}")
        return [known[byte] for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return list(map(self.encode, texts))

    def decode(self, ids: Sequence[int]) -> str:
        parts = {**dict(enumerate(PARTS)), EOD: b"<end>"}
        return b"".join(parts.get(number, b"%d" % number) for number in ids).decode(
            errors="replace"
        )


class LocalLink:
    """Connects one process."""

    is_leader = True

    def exchange(
        self, commands: Sequence[object], error: Exception | None = None
    ) -> Sequence[object]:
        return commands


@dataclass
class Listener:
    """Keeps the events of a job."""

    tokens: list[NewToken] = field(default_factory=list)
    ends: queue.SimpleQueue[Finished | Failed] = field(default_factory=queue.SimpleQueue)

    def __call__(self, event: Event) -> None:
        if isinstance(event, NewToken):
            self.tokens.append(event)
        else:
            self.ends.put(event)

    @property
    def end(self) -> Finished | Failed:
        """Waits for the end of the job."""
        return self.ends.get(timeout=DEADLINE)


class Running:
    """A scheduler that runs in a thread, and whose steps a test may hold."""

    def __init__(self, engine: GenerationEngine, start: Callable[[Any], Any], **more: Any) -> None:
        self.scheduler: Scheduler = Scheduler(
            engine,
            start,
            LocalLink(),
            **more,  # type: ignore[arg-type]
        )
        self.engine = engine
        self.gate = threading.Semaphore(0)
        """A step each; the held ones only."""
        self.is_held = False
        step = engine.step

        def held_step() -> Any:
            if self.is_held:
                assert self.gate.acquire(timeout=DEADLINE)
            return step()

        engine.step = held_step  # type: ignore[method-assign]

    def submit(self, job: GenerationJob, timeout: float = DEADLINE) -> tuple[Ticket, Listener]:
        listener = Listener()
        return self.scheduler.submit(job, listener, timeout), listener

    def result(self, job: GenerationJob) -> Finished | Failed:
        return self.submit(job)[1].end

    @contextmanager
    def hold(self) -> Iterator[None]:
        """The engine waits before a step, unless `gate` lets it pass."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False
            self.gate.release()


@contextmanager
def running(
    engine: GenerationEngine, start: Callable[[Any], Any], **more: Any
) -> Iterator[Running]:
    """Runs a scheduler until the end of the block."""
    server = Running(engine, start, **more)
    thread = threading.Thread(target=server.scheduler.run)
    thread.start()
    try:
        yield server
    finally:
        server.scheduler.stop()
        thread.join(DEADLINE)
        assert not thread.is_alive()


def wait_until(reached: Callable[[], bool]) -> None:
    """Waits for a condition, but not longer than a test may take."""
    waiting = threading.Event()
    for _ in range(int(DEADLINE / 0.001)):
        if reached():
            return
        waiting.wait(0.001)
    raise AssertionError("the condition was not reached")
