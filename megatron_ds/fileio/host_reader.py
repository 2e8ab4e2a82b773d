"""Reads files once per host: its first process reads them for all, and hands over the results.

The processes of a host meet at a socket, before the ranks of the run know each other. The first one
sends what it has read, and the mapped files as open descriptors, so that the others look up and
open nothing. A process to which nothing can be handed over reads by itself, as one that is alone
does: if the first process fails, was started with another command or does not answer, if a value
cannot be sent, and where the system has no such sockets. Knows nothing of what is read.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from megatron_ds.fileio import mapped_pickle
from megatron_ds.fileio.memory_map import MappedFile, map_file, mapped_file

T = TypeVar("T")
MEET_S = 5.0
"""Longest wait for the first process to be there."""
PAUSE_S = 0.02
HEADER = struct.Struct("<QQ")
"""Size of the content, and number of files; a size of 0 if nothing is handed over."""
KEPT_OPEN = 400
"""Files that stay open until all processes have them: 1024 is a usual limit of a process."""
FILES_AT_ONCE = 100
"""Descriptors in one message, and open at once; Linux allows 253."""
DIGEST_SIZE = 32


class HostReader:
    """Reads each value once for all processes of a host.

    All of them must call `read` for the same things in the same order.

    Args:
        name: Identifies the run on this host.
        rank: Of this process on the host.
        size: Number of processes on the host.
        command: What must be equal in all of them.
    """

    def __init__(self, name: str = "", rank: int = 0, size: int = 1, command: str = "") -> None:
        self._rank, self._others = rank, size - 1
        self._digest = hashlib.sha256(command.encode()).digest()
        digest = hashlib.sha256(f"{os.getuid()} {name}".encode()).hexdigest()
        self._address = f"\0megatron_ds-{digest}"
        self._values: list[_Sent | None] = []
        self._published = threading.Condition()
        self._connection: socket.socket | None = None
        self._is_alone = size == 1 or not sys.platform.startswith("linux")
        if rank == 0 and not self._is_alone:
            with suppress(OSError):  # another run has the name: this one's processes are alone
                self._listen()

    def read(self, make: Callable[[], T], may_send: Callable[[T], bool] = lambda _: True) -> T:
        """The result of `make`, which is called in the first process, and in others if need be.

        Args:
            make: Reads it.
            may_send: Whether a result may be handed over: it is copied, but for mapped arrays.

        Raises:
            Exception: What `make` raises.
        """
        if self._is_alone:
            return make()
        if self._rank:
            received = self._receive()
            return make() if received is None else received[0]
        sent = None
        try:
            value = make()
            with suppress(Exception):  # of any class that cannot be pickled
                sent = _Sent(*mapped_pickle.dumps(value)) if may_send(value) else None
            return value
        finally:
            with self._published:
                self._values.append(sent)
                self._published.notify_all()

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self._address)
        listener.listen(self._others)

        def accept() -> None:
            with listener:
                for _ in range(self._others):
                    connection, _ = listener.accept()
                    self._start(self._serve, connection)

        self._start(accept)

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        threading.Thread(target=work, args=arguments, name="host reader", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Sends every value, as soon as there is one, to another process."""
        with connection, suppress(OSError):
            if not _is_same_user(connection) or _receive(connection, DIGEST_SIZE) != self._digest:
                return
            number = 0
            while connection.recv(1):  # it waits for the next one
                _send(connection, self._value(number))
                self._release(number)
                number += 1

    def _value(self, number: int) -> _Sent | None:
        with self._published:
            self._published.wait_for(lambda: len(self._values) > number)
            return self._values[number]

    def _release(self, number: int) -> None:
        """Another process has a value; once all have it, its files are closed."""
        with self._published:
            if (value := self._values[number]) is not None:
                value.served += 1
                if value.served == self._others:
                    self._values[number] = None

    def _receive(self) -> tuple[Any] | None:
        """Tuple with the value that the first process has read; None if it hands nothing over."""
        try:
            if self._connection is None:
                self._connection = self._connect()
            self._connection.sendall(b"?")
            size, count = HEADER.unpack(_receive(self._connection, HEADER.size))
            if not size:
                return None
            files = _receive_files(self._connection, count)
            return (mapped_pickle.loads(_receive(self._connection, size), files),)
        except OSError:
            self._is_alone = True
            if self._connection is not None:
                self._connection.close()
            return None

    def _connect(self) -> socket.socket:
        end = time.monotonic() + MEET_S
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self._address)
                if not _is_same_user(connection):
                    raise PermissionError
                connection.sendall(self._digest)
                return connection
            except ConnectionRefusedError:
                connection.close()
                if time.monotonic() > end:
                    raise
                time.sleep(PAUSE_S)


class _Sent:
    """A value as it is sent, with its files; most are opened once for all processes."""

    def __init__(self, content: bytes, files: Sequence[MappedFile]) -> None:
        self.content, self.files, self.served = content, files, 0
        self._opened = _open(files[:KEPT_OPEN])
        weakref.finalize(self, _close, self._opened)

    def open(self, first: int) -> tuple[list[int], list[int]]:
        """Descriptors of files from a number on, and the ones to close."""
        kept = self._opened[first : first + FILES_AT_ONCE]
        opened = _open(self.files[first + len(kept) : first + FILES_AT_ONCE])
        return kept + opened, opened


def _open(files: Iterable[MappedFile]) -> list[int]:
    opened: list[int] = []
    try:
        for file in files:
            opened.append(file.open())
    except OSError:
        _close(opened)
        raise
    return opened


def _close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user: what it sends is unpickled."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())


def _send(connection: socket.socket, value: _Sent | None) -> None:
    if value is None:
        connection.sendall(HEADER.pack(0, 0))
        return
    connection.sendall(HEADER.pack(len(value.content), len(value.files)))
    for first in range(0, len(value.files), FILES_AT_ONCE):
        descriptors, opened = value.open(first)
        try:
            socket.send_fds(connection, [b"f"], descriptors)
        finally:
            _close(opened)
    connection.sendall(value.content)


def _receive_files(connection: socket.socket, count: int) -> list[MappedFile]:
    """Receives and maps files."""
    files: list[MappedFile] = []
    while len(files) < count:
        _, descriptors, _, _ = socket.recv_fds(connection, 1, FILES_AT_ONCE)
        if not descriptors:
            raise OSError("a file is missing")
        for descriptor in descriptors:
            with open(descriptor, "rb") as file:
                mapped = mapped_file(map_file(file))
            assert mapped is not None  # an empty file has no mapping
            files.append(mapped)
    return files


def _receive(connection: socket.socket, size: int) -> bytes:
    """Receives exactly so many bytes.

    Raises:
        OSError: If the other process ends the connection.
    """
    content = bytearray(size)
    view = memoryview(content)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionResetError
        view = view[count:]
    return bytes(content)
