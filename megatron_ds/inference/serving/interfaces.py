"""Protocols between a server and the interfaces that it serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from megatron_ds.inference.serving.scheduler import Finished, NewToken
from megatron_ds.inference.serving.service import GenerationJob


class EventStream(Protocol):
    """Converts the events of a job into JSON objects."""

    def of_token(self, token: NewToken) -> Iterator[dict[str, Any]]: ...

    def of_end(self, finished: Finished) -> Iterator[dict[str, Any]]: ...


class Api(Protocol):
    """An interface, which knows the requests and responses of one path."""

    def read(self, body: bytes) -> GenerationJob:
        """The job of a request. A UserError is the client's error."""
        ...

    def response(self, job: GenerationJob, finished: Finished) -> dict[str, Any]:
        """The response to a job that does not stream."""
        ...

    def events(self, job: GenerationJob) -> EventStream:
        """The events of a job that streams."""
        ...

    def error(self, message: str, status: int, codes: Sequence[str] = ()) -> dict[str, Any]:
        """The response to a request that failed."""
        ...
