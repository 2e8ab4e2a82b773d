"""Text generation servers of a test."""

from __future__ import annotations

import http.client
import json
from pathlib import Path
from typing import Any

from tests.e2e.runs import DEADLINE, REPOSITORY, Launcher, Run, free_port

SERVER = REPOSITORY / "tools" / "run_text_generation_server.py"


class Server:
    """A running server."""

    def __init__(self, launcher: Launcher, folder: Path, ranks: int, **more: Any) -> None:
        self.port = free_port()
        settings = {"load": folder, "port": self.port, "inference_max_requests": 4, **more}
        self.run: Run = launcher.start(settings, ranks=ranks, script=SERVER)
        self.run.wait_until(self._is_up)

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=DEADLINE)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def put(self, fields: dict[str, Any]) -> tuple[int, Any]:
        return self.send("PUT", "/api", json.dumps(fields).encode())

    def is_busy(self) -> bool:
        return bool(self.send("GET", "/health")[1]["requests"])

    def _is_up(self) -> bool:
        try:
            return self.send("GET", "/health")[0] == 200
        except OSError:
            return False
