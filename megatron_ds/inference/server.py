"""Text generation over HTTP: `PUT /api` as Megatron's server has it, one request at a time.

Owns HTTP and nothing else: bodies in, answers and errors out, all of them JSON objects; an error is
`{"message": ...}`. The only file that knows FastAPI.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from megatron_ds.inference.api_schema import MAX_BODY
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.tp_group import TpGroupBroken
from megatron_ds.inference.web_page import PAGE

MAX_DRAIN_BYTES = 8 * MAX_BODY
"""Bytes of a body that are read: a client that still sends does not hear that it was too much."""
SHUTDOWN_TIMEOUT_S = 10
"""That connections have, after a signal."""

Job = TypeVar("Job")


class TextServer(Generic[Job]):
    """Answers requests until a signal comes.

    read: body to job; its ValueError is the client's to mend. perform: job to answer; is told by
    the event when nobody wants it any more, and then raises Cancelled. say: takes a line for the
    log.
    """

    def __init__(
        self,
        read: Callable[[bytes], Job],
        perform: Callable[[Job, threading.Event], dict[str, Any]],
        say: Callable[[str], None],
    ) -> None:
        self._read = read
        self._perform = perform
        self._say = say
        self._stopping = threading.Event()
        self._turn = asyncio.Lock()
        self._requests = 0
        """That are performed, or wait for their turn."""
        self._at_work = threading.Lock()
        self._broken: TpGroupBroken | None = None
        self.app = self._build()

    def run(self, listener: socket.socket) -> None:
        """Serves until SIGTERM or SIGINT, in the main thread; a running request is cancelled then.

        When it returns, no work is going on. Raises CrewBroken when the ranks are out of step.
        """
        config = uvicorn.Config(
            self.app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
        )
        server = _Server(config)
        server.told = self.stop
        server.run(sockets=[listener])
        with self._at_work:
            pass
        if self._broken is not None:
            raise self._broken

    def stop(self) -> None:
        """Cancels what is running."""
        self._stopping.set()

    def _build(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        app.add_exception_handler(HTTPException, _http_error)
        app.add_api_route("/api", self._answer, methods=["PUT", "POST"])
        app.add_api_route("/health", self._health, methods=["GET"])
        app.add_api_route("/", _page, methods=["GET"])
        return app

    async def _answer(self, request: Request) -> Response:
        try:
            job = await asyncio.to_thread(self._read, await _body(request))
        except ClientDisconnect:
            return _error(400, "the body is not complete")
        except ValueError as error:
            return _error(400, str(error))
        self._requests += 1
        try:
            async with self._turn:
                return await self._performed(job, request)
        finally:
            self._requests -= 1

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok", "requests": self._requests})

    async def _performed(self, job: Job, request: Request) -> Response:
        cancelled = threading.Event()
        work = asyncio.create_task(asyncio.to_thread(self._work, job, cancelled))
        while not work.done():
            if self._stopping.is_set() or await request.is_disconnected():
                cancelled.set()
            await asyncio.wait({work}, timeout=0.1)
        try:
            return JSONResponse(work.result())
        except Cancelled:
            return _error(503, "the server is stopping")
        except TpGroupBroken as error:
            self._broken = error
            signal.raise_signal(signal.SIGTERM)
            return _error(500, f"the server ends: {error}")
        except Exception as error:
            self._say(traceback.format_exc())
            return _error(500, f"{type(error).__name__}: {error}")

    def _work(self, job: Job, cancelled: threading.Event) -> dict[str, Any]:
        with self._at_work:
            return self._perform(job, cancelled)


class _Server(uvicorn.Server):
    """Tells of a signal at once, and lets the process end in order after one."""

    told: Callable[[], None]

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.told()
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own sends itself the signal again in the end."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        before = [signal.signal(number, self.handle_exit) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def listen(host: str, port: int) -> socket.socket:
    """Raises ValueError where that is not possible."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise ValueError(f"--host {host} --port {port}: {error}") from None


async def _body(request: Request) -> bytes:
    """Raises ValueError where it is too long."""
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
        elif size > MAX_DRAIN_BYTES:
            break
    if size > MAX_BODY:
        raise ValueError(f"the body is longer than {MAX_BODY} bytes")
    return b"".join(parts)


async def _page() -> Response:
    return HTMLResponse(PAGE)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = {
        404: f"there is no {request.url.path}; requests go to PUT /api",
        405: f"{request.method} does not go with {request.url.path}; requests go to PUT /api",
    }
    return _error(error.status_code, words.get(error.status_code, error.detail), error.headers)


def _error(status: int, message: str, headers: Any = None) -> JSONResponse:
    return JSONResponse({"message": message}, status_code=status, headers=headers)
