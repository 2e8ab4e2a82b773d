"""HTTP server for text generation: `PUT /api` as in Megatron's server, one request at a time.

Owns HTTP and nothing else. Every response is a JSON object; an error is `{"message": ...}`, with
the codes of its problems if the request is invalid. The only module that knows FastAPI.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import urlsplit

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from megatron_ds.config.problems import UserError, user_error
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.tp_group import TpGroupBroken

MAX_BODY = 8 * 2**20
"""Bytes of a request."""
MAX_DRAIN_BYTES = 8 * MAX_BODY
"""Bytes of a body that are read: a client reads no response before it has sent its body."""
HEAD_TIMEOUT_S = 20.0
"""Within which a connection must send the head of a request."""
BODY_TIMEOUT_S = 60.0
"""Within which the body must follow."""
SHUTDOWN_TIMEOUT_S = 10
"""For open connections, after a signal."""

Job = TypeVar("Job")


class TextServer(Generic[Job]):
    """Serves requests until a signal arrives."""

    def __init__(
        self,
        read: Callable[[bytes], Job],
        run: Callable[[Job, threading.Event], dict[str, Any]],
        log: Callable[[str], None],
        hosts: Collection[str] | None = None,
        info: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            read: Converts a body into a job. A UserError is the client's error.
            run: Converts a job into a response. It raises `Cancelled` once the event is set, which
                means that the response is no longer wanted.
            log: Called with lines for the log.
            hosts: Names, in addition to this machine's, for which requests are accepted, see
                `_HostCheck`. None accepts all.
            info: Description of the model and initial settings, for the page for browsers.
        """
        self._read = read
        self._run_job = run
        self._log = log
        self._stopping = threading.Event()
        self._request_lock = asyncio.Lock()
        # A separate pool, so that long prompts take no thread from generation.
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._requests = 0
        """Requests that run or wait for their turn."""
        self._busy = threading.Lock()
        self._broken: TpGroupBroken | None = None
        self.app = FastAPI(openapi_url=None)
        self.app.add_exception_handler(HTTPException, _http_error)
        self.app.add_api_route("/api", self._respond, methods=["PUT", "POST"])
        self.app.add_api_route("/health", self._health, methods=["GET", "HEAD"])
        self.app.add_api_route("/info", lambda: JSONResponse(info), methods=["GET", "HEAD"])
        page = Path(__file__).with_name("web_page.html").read_text(encoding="utf-8")
        self.app.add_api_route("/", lambda: HTMLResponse(page), methods=["GET", "HEAD"])
        if hosts is not None:
            self.app.add_middleware(_HostCheck, hosts=hosts)

    def run(self, listener: socket.socket) -> None:
        """Serves until SIGTERM or SIGINT, which cancel a running request. Main thread only.

        No job runs after it has returned.

        Raises:
            TpGroupBroken: If the ranks are out of step.
        """
        config = uvicorn.Config(
            self.app, http=_HeadTimeout, ws="none", log_level="warning", lifespan="off"
        )
        config.timeout_graceful_shutdown = SHUTDOWN_TIMEOUT_S
        server = _Server(config)
        server.on_signal = self.stop
        server.run(sockets=[listener])
        # uvicorn does not wait for the thread of a request that it has given up.
        with self._busy:
            pass
        if self._broken is not None:
            raise self._broken

    def stop(self) -> None:
        """Cancels the running request."""
        self._stopping.set()

    async def _respond(self, request: Request) -> Response:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                body = await _body(request)
            loop = asyncio.get_running_loop()
            job = await loop.run_in_executor(self._readers, self._read, body)
        except ClientDisconnect:
            return _error(400, "the body is not complete")
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
            return _error(408, message, {"Connection": "close"})
        except UserError as error:
            codes = [problem.code for problem in error.problems]
            content = {"message": "; ".join(error.problems), "codes": codes}
            return JSONResponse(content, status_code=400)
        self._requests += 1
        try:
            async with self._request_lock:
                return await self._run_or_cancel(job, request)
        finally:
            self._requests -= 1

    async def _health(self) -> Response:
        return JSONResponse({"status": "ok", "requests": self._requests})

    async def _run_or_cancel(self, job: Job, request: Request) -> Response:
        cancelled = threading.Event()
        task = asyncio.create_task(asyncio.to_thread(self._run_exclusively, job, cancelled))
        while not task.done():
            if self._stopping.is_set() or await request.is_disconnected():
                cancelled.set()
            await asyncio.wait({task}, timeout=0.1)
        try:
            return JSONResponse(task.result())
        except Cancelled:
            return _error(503, "the server is stopping")
        except TpGroupBroken as error:
            self._broken = error
            signal.raise_signal(signal.SIGTERM)
            return _error(500, f"the server stops: {error}")
        except UserError as error:  # of the model, since the request is valid
            self._log(f"ERROR: {error}")
            return _error(500, str(error))
        except Exception as error:
            self._log(traceback.format_exc())
            return _error(500, f"{type(error).__name__}: {error}")

    def _run_exclusively(self, job: Job, cancelled: threading.Event) -> dict[str, Any]:
        with self._busy:
            return self._run_job(job, cancelled)


class _HostCheck:
    """Rejects requests that web pages of other sites send through a browser of this machine.

    Such a request has the page's site as its origin or, after DNS rebinding, as its host.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = {host.lower().rstrip(".") for host in (*hosts, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        for name, prefix in (("host", "//"), ("origin", "")):
            value = headers.get(name)
            if value is not None and not self._is_accepted(prefix + value):
                message = f"the {name} {value} is not accepted; --allowed-hosts adds a host"
                await _error(403, message)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_accepted(self, url: str) -> bool:
        try:
            host = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        return host in self._hosts or is_loopback(host)


class _HeadTimeout(H11Protocol):
    """Closes connections that do not complete the head of a request, for which uvicorn waits
    indefinitely."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
        super().connection_lost(exc)

    def _start_timer(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._end, self.cycle)

    def _end(self, last: object) -> None:
        """Closes the connection unless a request has followed the last one."""
        self._head_timer = None
        if self.cycle is last:
            self.transport.close()
        else:
            self._start_timer()  # for a head that has begun meanwhile


class _Server(uvicorn.Server):
    """Reports a signal immediately, and returns from `run` after one."""

    on_signal: Callable[[], None]

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.on_signal()
        super().handle_exit(sig, frame)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own method raises the signal again at the end, which would kill the process."""
        numbers = (signal.SIGTERM, signal.SIGINT)
        previous = [signal.signal(number, self.handle_exit) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, previous, strict=True):
                signal.signal(number, handler)


def is_loopback(host: str) -> bool:
    """Whether a host is an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    Raises:
        UserError: If the address cannot be used.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise user_error("server-address-unusable", host=host, port=port, error=error) from None


async def _body(request: Request) -> bytes:
    """
    Raises:
        UserError: If the body is too long.
    """
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size <= MAX_BODY:
            parts.append(part)
        elif size > MAX_DRAIN_BYTES:
            break
    if size > MAX_BODY:
        raise user_error("request-too-long", limit=MAX_BODY)
    return b"".join(parts)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    messages = {
        404: f"{request.url.path} does not exist; use PUT /api",
        405: f"{request.method} is not allowed for {request.url.path}; use PUT /api",
    }
    message = messages.get(error.status_code, error.detail)
    return _error(error.status_code, message, error.headers)


def _error(status: int, message: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"message": message}, status_code=status, headers=headers)
