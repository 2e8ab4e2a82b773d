"""Protocols between a server, the interfaces that it serves, and their jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

from megatron_ds.inference.serving.scheduler import AnyJob, Finished, NewToken


class ServedJob(AnyJob, Protocol):
    """The fields of a job that the server reads."""

    @property
    def prompts(self) -> Sequence[Sequence[int]]: ...

    @property
    def log(self) -> bool:
        """Whether to log token counts."""
        ...


Job = TypeVar("Job", bound=ServedJob)


class EventStream(Protocol):
    """Converts the events of a job into JSON objects."""

    def of_token(self, token: NewToken) -> Iterator[dict[str, Any]]: ...

    def of_end(self, finished: Finished) -> Iterator[dict[str, Any]]: ...


class Api(Protocol[Job]):
    """An interface, which knows the requests and responses of one path."""

    def read(self, body: bytes) -> Job:
        """The job of a request. A UserError is the client's error."""
        ...

    def response(self, job: Job, finished: Finished) -> dict[str, Any]:
        """The response to a job that does not stream."""
        ...

    def events(self, job: Job) -> EventStream:
        """The events of a job that streams."""
        ...

    def error(self, message: str, status: int, codes: Sequence[str] = ()) -> dict[str, Any]:
        """The response to a request that failed."""
        ...
