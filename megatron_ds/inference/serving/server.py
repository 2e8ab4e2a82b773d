"""HTTP server for text generation. Must not know models or requests.

Owns HTTP and nothing else. Each path's interface reads requests and writes responses: JSON objects
or server-sent events of them. Only this module and `access` know FastAPI.
"""

from __future__ import annotations

import asyncio
import functools
import json
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from megatron_ds.config.problems import UserError, counted, user_error
from megatron_ds.inference.generate import Cancelled
from megatron_ds.inference.generation.sequences import TextSequence
from megatron_ds.inference.generation.tp_group import TpGroupBroken
from megatron_ds.inference.serving.access import HostCheck, KeyCheck, error_response
from megatron_ds.inference.serving.interfaces import Api
from megatron_ds.inference.serving.scheduler import (
    Event,
    Failed,
    Finished,
    NewToken,
    Scheduler,
    Ticket,
    TimedOut,
    TooManyWaiting,
)
from megatron_ds.inference.serving.server_metrics import ServerMetrics
from megatron_ds.inference.serving.service import GenerationJob
from megatron_ds.inference.serving.stop_signals import stopping
from megatron_ds.inference.serving.worker_thread import WorkerThread
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.launch.process.time_limits import end_process

MAX_BODY = 8 * 2**20
"""Bytes of a request."""
MAX_HELD_BYTES = 8 * MAX_BODY
"""Bytes of all bodies that are being received or read."""
MAX_DRAIN_BYTES = 8 * MAX_BODY
"""Bytes of a body that are read: a client reads no response before it has sent its body."""
BODY_TIMEOUT_S = 60.0
"""Seconds within which a body must be received, and the same again for reading it."""
KEEP_ALIVE_S = 30
"""Seconds after which an idle connection is closed. Longer than the 5 s of clients, which could
otherwise send a request on a connection that is being closed."""
GRACE_S = 1.0
"""Seconds after the deadline of a request at which it ends even if its job has not answered."""
STALL_S = 60.0
"""Duration of a step of the model after which the server reports that it is not healthy."""
SHUTDOWN_TIMEOUT_S = 5
"""Seconds that open connections may last after a signal."""
EXIT_TIMEOUT_S = 7.0
"""Seconds after a signal at which the process ends even during a step of the model."""
PAGE_HEADERS = {"X-Frame-Options": "DENY", "X-Content-Type-Options": "nosniff"}


@dataclass(frozen=True)
class ServerOptions:
    """Settings for handling requests."""

    hosts: Collection[str] | None = None
    """Names, in addition to this machine's, for which requests are accepted, see `HostCheck`. None
    accepts all."""
    origins: Sequence[str] = ()
    """Sites, besides the hosts' own, whose pages may send requests; * is any."""
    keys: Collection[str] = ()
    """Accepted bearer tokens. Empty: no authentication."""
    timeout: float = 600.0
    """Seconds until a request fails."""


class TextServer:
    """Serves requests until a signal arrives."""

    def __init__(
        self,
        scheduler: Scheduler,
        apis: Mapping[str, Api],
        log: Callable[[str], None],
        options: ServerOptions,
        documents: Mapping[str, Mapping[str, Any]],
    ) -> None:
        """
        Args:
            scheduler: Runs the jobs.
            apis: APIs by path.
            log: Called with lines for the log.
            options: Options of the handling of requests.
            documents: JSON objects by path, for GET.
        """
        self._scheduler = scheduler
        self._apis = apis
        self._log = log
        self._options = options
        self._metrics = ServerMetrics(scheduler)
        # In threads, so that long prompts take no time from other requests; an interface that
        # waits, such as for a chat template, delays no other one.
        self._readers = {path: WorkerThread() for path in apis}
        self._read_s = min(BODY_TIMEOUT_S, options.timeout)
        self._held_bytes = 0
        self.app = FastAPI(openapi_url=None)
        self.app.add_exception_handler(HTTPException, self._http_error)
        for path in apis:
            methods = ["PUT", "POST"] if path == "/api" else ["POST"]
            self.app.add_api_route(path, self._respond, methods=methods)
        self.app.add_api_route("/health", self._health, methods=["GET", "HEAD"])
        self.app.add_api_route("/metrics", self._show_metrics, methods=["GET", "HEAD"])
        for path, document in documents.items():
            respond = functools.partial(JSONResponse, dict(document))
            self.app.add_api_route(path, lambda respond=respond: respond(), methods=["GET", "HEAD"])
        page = Path(__file__).with_name("web_page.html").read_text(encoding="utf-8")
        self.app.add_api_route(
            "/", lambda: HTMLResponse(page, headers=PAGE_HEADERS), methods=["GET", "HEAD"]
        )
        if options.keys:
            self.app.add_middleware(KeyCheck, keys=options.keys)
        if options.hosts is not None:
            self.app.add_middleware(HostCheck, hosts=options.hosts, origins=options.origins)
        if options.origins:
            allowed: Any = {"allow_methods": ["*"], "allow_headers": ["*"]}
            self.app.add_middleware(CORSMiddleware, allow_origins=options.origins, **allowed)

    def run(self, listener: socket.socket) -> None:
        """Serves until SIGTERM or SIGINT, which cancel the requests. Main thread only.

        Raises:
            TpGroupBroken: If the ranks are out of step.
            RuntimeError: If HTTP ends without a signal.
        """
        config = uvicorn.Config(
            self.app, http="h11", ws="none", log_level="warning", lifespan="off"
        )
        config.timeout_keep_alive = KEEP_ALIVE_S
        config.timeout_graceful_shutdown = SHUTDOWN_TIMEOUT_S
        server = _Server(config)
        ends: list[BaseException | None] = []

        def stop(signum: int) -> None:
            server.handle_exit(signum, None)  # a second SIGINT gives up open connections
            self._scheduler.stop()

        end = functools.partial(end_process, ExitCode.FINISHED)
        with stopping(stop, end, EXIT_TIMEOUT_S):
            # The model stays in the main thread: a second thread would have threads of its own
            # for matrix products, and they would wait for each other.
            serving = threading.Thread(
                target=_serve, args=(server, listener, ends, self._scheduler.stop), name="http"
            )
            serving.start()
            try:
                self._scheduler.run()
            finally:
                was_stopped = server.should_exit
                server.should_exit = True
                serving.join()
        if ends[0] is not None or not was_stopped:
            raise RuntimeError("the HTTP server has ended by itself") from ends[0]

    async def _http_error(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        allowed = (error.headers or {}).get("Allow")
        message = error.detail
        if error.status_code == 404:
            message = f"{path} does not exist; requests for texts are POST {', '.join(self._apis)}"
        elif allowed:
            message = f"{request.method} is not allowed for {path}; use {allowed}"
        return error_response(path, error.status_code, message, error.headers)

    async def _respond(self, request: Request) -> Response:
        path = request.url.path
        response = await self._answer(request, self._apis[path], self._readers[path])
        self._metrics.responses.labels(path, str(response.status_code)).inc()
        return response

    async def _answer(self, request: Request, api: Api, reader: WorkerThread) -> Response:
        def error(
            message: str, status: int, codes: Sequence[str] = (), **headers: str
        ) -> JSONResponse:
            return JSONResponse(api.error(message, status, codes), status, headers=headers)

        loop = asyncio.get_running_loop()
        try:
            job = await self._read(request, api, reader)
        except ClientDisconnect:
            return error("the body is not complete", 400)
        except TimedOut:
            return error(f"the request was not read within {self._read_s:g} s", 504)
        except TooManyWaiting:
            message = f"bodies have {MAX_HELD_BYTES} bytes together; repeat this request later"
            return error(message, 503, **{"Retry-After": "1"})
        except TimeoutError:
            message = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
            return error(message, 408, Connection="close")
        except UserError as problem:
            codes = [entry.code for entry in problem.problems]
            status = 404 if "model-not-served" in codes else 400
            return error("; ".join(map(str, problem.problems)), status, codes)
        except Exception as problem:
            return error(*self._explain(problem))
        deadline = loop.time() + self._options.timeout
        events: asyncio.Queue[Event] = asyncio.Queue()

        def listen_to(event: Event) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            ticket = self._scheduler.submit(job, listen_to, self._options.timeout)
        except TooManyWaiting:
            return error(
                "too many requests wait; repeat this one later", 429, **{"Retry-After": "1"}
            )
        except Cancelled:
            return error("the server is stopping", 503)
        if job.stream:
            stream = self._stream(api, reader, ticket, events, deadline + GRACE_S)
            return StreamingResponse(stream, media_type="text/event-stream")
        return await self._wait(request, api, reader, ticket, events, deadline + GRACE_S)

    async def _wait(
        self,
        request: Request,
        api: Api,
        reader: WorkerThread,
        ticket: Ticket,
        events: asyncio.Queue[Event],
        deadline: float,
    ) -> Response:
        """The response to a job that does not stream."""
        job = ticket.job
        ended = asyncio.ensure_future(events.get())
        disconnected = asyncio.ensure_future(_wait_for_disconnect(request))
        try:
            async with asyncio.timeout_at(deadline):
                await asyncio.wait({ended, disconnected}, return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                return JSONResponse(api.error("the client has disconnected", 499), 499)
            if isinstance(event := ended.result(), Failed):
                raise event.error
            assert isinstance(event, Finished)
            left = deadline - asyncio.get_running_loop().time()
            response = await reader.call(left, lambda: JSONResponse(api.response(job, event)))
        except Exception as problem:
            message, status = self._explain(problem)
            return JSONResponse(api.error(message, status), status)
        finally:
            ended.cancel()
            disconnected.cancel()
            self._scheduler.cancel(ticket)
        self._finish(ticket, event)
        return response

    async def _read(self, request: Request, api: Api, reader: WorkerThread) -> GenerationJob:
        """The job of a request.

        Raises:
            UserError: If the body is invalid.
            TooManyWaiting: If there are too many bodies.
            TimeoutError: If it does not arrive in time.
            TimedOut: If it cannot be read in time.
        """
        body = bytearray()
        size = 0
        has_room = True
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                async for part in request.stream():
                    size += len(part)
                    has_room = has_room and self._held_bytes + len(part) <= MAX_HELD_BYTES
                    if size <= MAX_BODY and has_room:
                        body += part
                        self._held_bytes += len(part)
                    elif size > MAX_DRAIN_BYTES:
                        break
            if size > MAX_BODY:
                raise user_error("request-too-long", limit=MAX_BODY)
            if not has_room:
                raise TooManyWaiting
            try:
                return await reader.call(self._read_s, api.read, bytes(body))
            except TimeoutError:
                raise TimedOut from None
        finally:
            self._held_bytes -= len(body)

    async def _stream(
        self,
        api: Api,
        reader: WorkerThread,
        ticket: Ticket,
        events: asyncio.Queue[Event],
        deadline: float,
    ) -> AsyncIterator[str]:
        """Server-sent events; ends early with an object that has the key error."""
        stream = api.events(ticket.job)
        of_token = stream.of_token
        of_end = stream.of_end
        try:
            while True:
                async with asyncio.timeout_at(deadline):
                    event = await events.get()
                if isinstance(event, Failed):
                    raise event.error
                parts: Any = of_token(event) if isinstance(event, NewToken) else of_end(event)
                if isinstance(event, Finished) or event.prompt_scores:  # which may take long
                    parts = await reader.call(BODY_TIMEOUT_S, list[Any], parts)
                for part in parts:
                    yield _event(part)
                if isinstance(event, Finished):
                    self._finish(ticket, event)
                    yield "data: [DONE]\n\n"
                    return
        except Exception as error:
            yield _event(api.error(*self._explain(error)))
        finally:  # also when the client disconnects
            self._scheduler.cancel(ticket)

    def _explain(self, error: Exception) -> tuple[str, int]:
        """Message and status of a job without a result."""
        if isinstance(error, Cancelled):
            return "the server is stopping", 503
        if isinstance(error, TimedOut | TimeoutError):
            return f"the request did not end within {self._options.timeout:g} s", 504
        if isinstance(error, TpGroupBroken):
            return f"the server stops: {error}", 500
        if isinstance(error, UserError):  # of the model, since the request is valid
            self._log(f"ERROR: {error}")
            return str(error), 500
        self._log("".join(traceback.format_exception(error)))
        return f"{type(error).__name__}: {error}", 500

    def _finish(self, ticket: Ticket, finished: Finished) -> None:
        """Records a job with a result."""
        job = ticket.job
        now = time.monotonic()
        self._metrics.seconds.observe(now - ticket.submitted)
        if ticket.started is not None:
            self._metrics.first_token.observe(ticket.started - ticket.submitted)
        if job.log:
            tokens = sum(map(len, job.prompts))
            texts = len(finished.result)
            new = sum(
                len(item.new_ids) if isinstance(item, TextSequence) else len(item.ids)
                for item in finished.result
            )
            self._log(
                f"{time.strftime('%Y-%m-%d %H:%M:%S')} prompts: {len(job.prompts)} of "
                f"{counted(tokens, 'token')}, texts: {texts} with {counted(new, 'new token')}, "
                f"{now - ticket.submitted:.2f} s"
            )

    async def _health(self) -> Response:
        status = "ok"
        if self._scheduler.step_s > STALL_S:
            status = f"a step takes longer than {STALL_S:.0f} s"
        elif any(reader.is_stuck for reader in self._readers.values()):
            status = "no request can be read, because earlier ones are still being read"
        content = {"status": status, "requests": self._scheduler.jobs}
        return JSONResponse(content, 200 if status == "ok" else 503)

    async def _show_metrics(self) -> Response:
        return Response(self._metrics.text(), media_type=self._metrics.content_type)


def _serve(
    server: uvicorn.Server,
    listener: socket.socket,
    ends: list[BaseException | None],
    stop: Callable[[], object],
) -> None:
    """Runs HTTP in its thread, and adds to `ends` the exception that has ended it."""
    error: BaseException | None = None
    try:
        server.run(sockets=[listener])
    except BaseException as raised:  # SystemExit, too, which would end the thread silently
        error = raised
    finally:
        ends.append(error)
        stop()


class _Server(uvicorn.Server):
    """A server in a thread, where signals do not arrive."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves the signals alone."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """Opens a listening socket.

    Raises:
        UserError: If the address cannot be used.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except (OSError, OverflowError, UnicodeError) as error:
        raise user_error("server-address-unusable", host=host, port=port, error=error) from None
    # For connections, too: without it, a response's end waits 40 ms for an acknowledgment.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


async def _wait_for_disconnect(request: Request) -> None:
    """Returns when the client of a request, whose body has been read, closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _event(content: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(content, ensure_ascii=False, allow_nan=False)}\n\n"
