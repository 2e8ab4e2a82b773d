"""Chat templates of others, rendered in a process with limits.

A template is a program. The sandbox of transformers keeps it from files, but not from computing for
long, some of it in calls that hold the interpreter's lock, or from filling the memory. So the
kernel limits its processor time and memory, and the program that needs the text waits for another
process.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from megatron_ds.config.problems import UserError, sized, user_error
from megatron_ds.tokenizer.chat_template import LIBRARY, ChatTemplate

START_S = 120.0
"""Time limit for the start of the process, whose import of the library takes seconds of CPU
time."""
WAIT_FACTOR = 6.0
"""Time limit of a reply as a multiple of the limit of CPU time, for busy machines."""
END_S = 1.0
"""Seconds within which a process that has closed its output must exit."""
MAX_CHARS = 2**24
"""Characters of a text."""
MAX_ERROR_CHARS = 1000
PROBE = ({"role": "user", "content": "Hello"},)
"""A conversation that every template should render."""
PROGRAM = "import sys; sys.path[:0] = [sys.argv[1]]; from {module} import serve; serve(sys.argv[2])"
ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class TemplateLimits:
    """Limits of the resources for rendering a conversation."""

    seconds: float = 5.0
    """Seconds of CPU time."""
    memory: int = 500_000_000
    """Bytes of memory in addition to the library's."""


class TemplateProcess:
    """Renders the conversations of one template, one after another, in any thread.

    The process starts at once and is kept. After a conversation that exceeds a limit it is
    replaced.
    """

    def __init__(
        self,
        template: ChatTemplate,
        limits: TemplateLimits | None = None,
        renderer: str = f"{LIBRARY}:render_jinja_template",
    ) -> None:
        """
        Args:
            template: The template.
            limits: Limits of each conversation, compilation of the template included.
            renderer: Module and name of the function that renders, as transformers has it.
        """
        self._limits = limits or TemplateLimits()
        settings = {"template": asdict(template), "limits": asdict(self._limits)}
        self._settings = json.dumps({**settings, "renderer": renderer})
        self._lock = threading.Lock()
        self._is_ready = False
        self._process = self._start()

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The conversation up to the place where the answer begins.

        Raises:
            UserError: If the template rejects the messages or exceeds a limit, or transformers is
                missing.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._replace()
            if not self._is_ready:
                self._wait_until_ready()
            reply = self._ask(messages)
            if reason := reply.get("limit"):
                self._replace()
        if reason:
            seconds = self._limits.seconds
            memory = sized(self._limits.memory)
            raise user_error(
                "chat-template-exceeds-limits", seconds=seconds, memory=memory, reason=reason
            )
        if "error" in reply:
            raise user_error("chat-template-failed", why=reply["error"])
        return str(reply["text"])

    def warning(self) -> UserError | None:
        """Why the template renders no conversation, as far as a probe shows it.

        Raises:
            UserError: If it exceeds a limit.
        """
        try:
            self.render(PROBE)
        except UserError as error:
            if any(problem.code == "chat-template-exceeds-limits" for problem in error.problems):
                raise
            return error
        return None

    def close(self) -> None:
        """Ends the process."""
        self._end()

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(module=__name__), str(ROOT), self._settings],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # signals to the group of this process are not for it
        )
        self._end = weakref.finalize(self, _end, process)
        return process

    def _replace(self) -> None:
        self._end()
        self._is_ready = False
        self._process = self._start()

    def _wait_until_ready(self) -> None:
        reply = self._reply(START_S)
        if "ready" not in reply:
            self._replace()
        if "missing" in reply:
            values = {"needed_by": "a chat template", "name": LIBRARY.partition(".")[0]}
            raise user_error("library-missing", error=reply["missing"], **values)
        if "limit" in reply:
            raise user_error("chat-template-process-failed", reason=reply["limit"])
        self._is_ready = True

    def _ask(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        content = json.dumps(list(messages)).encode() + b"\n"
        return self._reply(WAIT_FACTOR * self._limits.seconds, content)

    def _reply(self, timeout: float, content: bytes = b"") -> dict[str, Any]:
        """The next reply, after sending something; with the key limit if the process ends first."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        is_late = False

        def stop() -> None:
            nonlocal is_late
            is_late = True
            process.kill()

        timer = threading.Timer(timeout, stop)
        timer.daemon = True
        timer.start()
        try:
            if content:
                with suppress(BrokenPipeError):  # it may have replied before
                    process.stdin.write(content)
                    process.stdin.flush()
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if line.endswith(b"\n"):
            return dict(json.loads(line))
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        process.kill()
        status = process.wait()
        if is_late or status == -signal.SIGPROF:
            return {"limit": "it took longer"}
        return {"limit": f"its process ended with status {status}"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with process:  # closes the pipes and waits
        pass


def serve(settings: str) -> None:
    """The work of the process: a conversation and its text or error per line, in JSON.

    The kernel ends it after its time, also while a call holds the interpreter's lock.
    """
    values = json.loads(settings)
    template = ChatTemplate(**values["template"])
    limits = TemplateLimits(**values["limits"])
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # for what libraries print

    def reply(**content: str) -> None:
        print(json.dumps(content), file=replies, flush=True)

    try:
        renderer = resolve_name(values["renderer"])
    except ImportError as error:
        reply(missing=str(error))
        return
    _limit_memory(limits.memory)
    reply(ready="")
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, limits.seconds)
        content = _rendered(template, renderer, line)
        signal.setitimer(signal.ITIMER_PROF, 0)
        reply(**content)


def _rendered(template: ChatTemplate, renderer: Any, line: bytes) -> dict[str, str]:
    try:
        text = template.render_with(renderer, json.loads(line))
    except MemoryError:
        return {"limit": "it needed more memory"}
    except Exception as error:
        return {"error": str(error)[:MAX_ERROR_CHARS] or type(error).__name__}
    if len(text) > MAX_CHARS:
        return {"limit": f"its text has more than {MAX_CHARS} characters"}
    return {"text": text}


def _limit_memory(num_bytes: int) -> None:
    """Limits the address space to what this process has and some more."""
    pages = Path("/proc/self/statm")
    if pages.exists():  # on Linux
        limit = int(pages.read_text().split()[0]) * resource.getpagesize() + num_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
