"""Functions that a test puts in the place of the library's that renders chat templates."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

Messages = Sequence[Sequence[Mapping[str, Any]]]
HOLD_S = 3
"""Long enough for any limit of a test, short enough for a test without the limit to end."""


def render(conversations: Messages, chat_template: str, **_: Any) -> tuple[list[str], list[Any]]:
    """Does what the last message says."""
    (messages,) = conversations
    content = messages[-1]["content"]
    if content == "hold the lock and wait":
        ctypes.PyDLL(None).sleep(HOLD_S)
    elif content == "hold the lock and compute":
        sum(range(10**8 * HOLD_S))
    elif content == "allocate":
        bytearray(2**28)
    elif content == "write":
        return ["x" * 2**20], []
    elif content == "exit":
        os._exit(3)
    elif content == "reject":
        raise ValueError("no such role" + "!" * 10_000)
    return [f"{chat_template}: {os.getpid()} {content}"], []
