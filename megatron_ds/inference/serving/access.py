"""Access to a server: the keys and hosts of accepted HTTP requests. Must not know their content."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from megatron_ds.inference.serving.api_schema import openai_error


class KeyCheck:
    """Rejects requests without one of the keys, except for the page and the state of the server."""

    OPEN = ("/", "/health")

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        token = key.strip().encode("latin-1")  # the bytes of the header
        is_known = any(hmac.compare_digest(token, known) for known in self._keys)
        if scope["path"] in self.OPEN or (scheme.lower() == "bearer" and is_known):
            await self._app(scope, receive, send)
            return
        message = "a key is required: Authorization: Bearer KEY"
        headers = {"WWW-Authenticate": "Bearer"}
        await error_response(scope["path"], 401, message, headers)(scope, receive, send)


class HostCheck:
    """Rejects requests that web pages of other sites send through a browser of this machine.

    Such a request has the page's site as its origin or, after DNS rebinding, as its host.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str], origins: Collection[str]) -> None:
        self._app = app
        self._origins = origins
        self._hosts = {host.lower().rstrip(".") for host in (*hosts, "localhost")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        for name, prefix in (("host", "//"), ("origin", "")):
            value = headers.get(name)
            if value is None or (name == "origin" and {value, "*"} & {*self._origins}):
                continue
            if not self._is_accepted(prefix + value):
                message = f"the {name} {value} is not accepted; --allowed-{name}s adds {name}s"
                await error_response(scope["path"], 403, message)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_accepted(self, url: str) -> bool:
        try:
            host = (urlsplit(url).hostname or "").rstrip(".")
        except ValueError:
            return False
        return host in self._hosts or is_loopback(host)


def is_loopback(host: str) -> bool:
    """Whether a host is an address that only this machine can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def error_response(
    path: str, status: int, message: str, headers: Mapping[str, str] | None = None
) -> JSONResponse:
    """An error in the form of a path's interface."""
    content = openai_error(message, status) if path.startswith("/v1/") else {"message": message}
    return JSONResponse(content, status, headers)
