"""Stores by URL: the same contract for every client, retries, and errors that name the object."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from megatron_ds.fileio import object_store
from megatron_ds.fileio.object_store import ObjectStore
from tests.fork_server import REPOSITORY
from tests.object_server import BUCKET, SERVER, client_variables, s3_server
from tests.problems import raises_problem


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "FIRST_PAUSE_S", 0.01)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    with s3_server(tmp_path_factory.mktemp("s3") / "log") as variables:
        yield variables


def put_object(server: Mapping[str, str], name: str) -> None:
    """Creates an object of any name, which a client may refuse."""
    address = f"{server['AWS_ENDPOINT_URL']}/{BUCKET}/{quote(name)}"
    urllib.request.urlopen(urllib.request.Request(address, data=b"x", method="PUT")).close()


def check_contract(url: str, folder: Path) -> None:
    """Writes, reads, lists, transfers and deletes files; run for every client."""
    store = ObjectStore(url + "/")
    assert store.sizes() == {}
    store.write("a/one", b"1")
    store.write("a/one", b"22")
    store.write("b", b"")
    assert store.sizes() == {"a/one": 2, "b": 0}
    assert store.sizes("a") == {"a/one": 2}
    assert store.sizes("absent") == {}
    assert store.read("a/one") == b"22"
    with pytest.raises(FileNotFoundError, match=f"{url}/absent"):
        store.read("absent")

    assert store.version("absent") is None
    before = store.version("a/one")
    assert before is not None
    assert before.size == 2
    assert store.read_range("a/one", 1, 2) == (b"2", before)
    with pytest.raises(OSError, match="a/one"):
        store.read_range("a/one", 1, 9)
    store.write("a/one", b"33")
    content, after = store.read_range("a/one", 0, 2)
    assert (content, after) == (b"33", store.version("a/one"))
    assert after != before
    with pytest.raises(FileNotFoundError, match="absent"):
        store.read_range("absent", 0, 1)

    assert store.create("lock", b"first")
    assert not store.create("lock", b"second")
    assert store.read("lock") == b"first"

    content = os.urandom(3 * 2**20 + 5)
    (folder / "source").write_bytes(content)
    store.upload(folder / "source", "deep/er/file")
    assert store.sizes("deep") == {"deep/er/file": len(content)}
    store.download("deep/er/file", folder / "copy", len(content))
    assert (folder / "copy").read_bytes() == content
    with pytest.raises(OSError, match="deep/er/file"):
        store.download("deep/er/file", folder / "copy", len(content) + 1)
    with pytest.raises(FileNotFoundError, match="absent"):
        store.download("absent", folder / "copy", 1)
    (folder / "empty").touch()
    store.upload(folder / "empty", "empty")
    store.download("empty", folder / "copy", 0)
    assert (folder / "copy").read_bytes() == b""

    for name in ("a/one", "a/one", "absent"):
        store.remove(name)
    assert store.sizes("a") == {}
    for name in store.sizes():
        store.remove(name)
    if url.startswith("file:"):
        assert [path.name for path in Path(url.removeprefix("file://")).iterdir()] == []


@pytest.fixture
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "RANGE", 2**20)


@pytest.mark.usefixtures("small_ranges")
@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_file_system_of_fsspec_is_a_store(scheme: str, tmp_path: Path) -> None:
    check_contract(f"{scheme}://{tmp_path / 'store'}", tmp_path)


@pytest.mark.usefixtures("small_ranges")
def test_s3_is_a_store(
    server: Mapping[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    check_contract(f"s3://{BUCKET}/contract", tmp_path)
    store = ObjectStore(f"s3://{BUCKET}/contract")
    created: list[bool] = []
    threads = [
        threading.Thread(target=lambda: created.append(store.create("lock", b"mine")))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(created) == [False] * 7 + [True]
    with pytest.raises(OSError, match="no such bucket"):
        ObjectStore("s3://absent/folder").sizes()
    put_object(server, "obstore//x")
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it is repeated"))
    with pytest.raises(IsADirectoryError, match="obstore//"):  # which obstore cannot list
        ObjectStore(f"s3://{BUCKET}/obstore").sizes()


def test_s3_is_a_store_with_the_client_of_fsspec(server: Mapping[str, str], tmp_path: Path) -> None:
    """In a process of its own: s3fs needs older packages than the environment has.

    Objects whose names are no paths are left out.

    Claim (checkpoints): a store that does not answer is named after seconds and given up; an object
    with an impossible name is left out, or named where the client cannot list it
    """
    for name in ("file", "/x", "../x", "./x"):
        put_object(server, f"names/{name}")
    code = (
        "import sys; from pathlib import Path; import s3fs\n"
        "from megatron_ds.fileio import object_store\n"
        "object_store.FIRST_PAUSE_S, object_store.RANGE = 0.01, 2**20\n"
        "from tests.unit.fileio.test_object_store import check_contract\n"
        f"check_contract('s3://{BUCKET}/s3fs', Path({str(tmp_path)!r}))\n"
        f"store = object_store.ObjectStore('s3://{BUCKET}/s3fs')\n"
        "assert isinstance(store._fs, s3fs.S3FileSystem)\n"
        f"store = object_store.ObjectStore('s3://{BUCKET}/names')\n"
        "assert [*store.sizes()] == ['file'], store.sizes()\n"
    )
    path = os.pathsep.join(map(str, (SERVER, REPOSITORY)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **server, "PYTHONPATH": path},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


class Failing(MemoryFileSystem):
    """Fails so many times, then works."""

    protocol = "failing"
    failures = 0

    def _fail(self) -> None:
        if Failing.failures > 0:
            Failing.failures -= 1
            raise RuntimeError("the server is busy\nwith a long explanation")

    def cat_file(self, *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return super().cat_file(*args, **kwargs)

    def put_file(self, *args: Any, **kwargs: Any) -> Any:
        self._fail()
        return super().put_file(*args, **kwargs)


def test_requests_are_repeated_and_lasting_errors_name_the_object(tmp_path: Path) -> None:
    fsspec.register_implementation("failing", Failing, clobber=True)
    store = ObjectStore("failing://repeated")
    (tmp_path / "file").write_bytes(b"content")
    Failing.failures = 2
    store.upload(tmp_path / "file", "name")
    assert Failing.failures == 0
    Failing.failures = 3
    store.download("name", tmp_path / "copy", 7)
    assert (tmp_path / "copy").read_bytes() == b"content"
    Failing.failures = object_store.ATTEMPTS
    with pytest.raises(OSError, match=r"^failing://repeated/name: the server is busy$"):
        store.read("name")
    assert Failing.failures == 0


def test_a_store_that_does_not_answer_is_named_and_soon_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (checkpoints): a store that does not answer is named after seconds and given up; an
    object with an impossible name is left out, or named where the client cannot list it"""
    fsspec.register_implementation("failing", Failing, clobber=True)
    store = ObjectStore("failing://silent")
    noticed = threading.Event()
    lines = list[str]()

    def show(line: str, **_: object) -> None:
        lines.append(line)
        noticed.set()

    monkeypatch.setattr("builtins.print", show)
    monkeypatch.setattr(object_store, "NOTICE_S", 0.0)
    monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: noticed.wait(20) and {})
    assert store.sizes("folder") == {}
    assert ["failing://silent/folder" in line for line in lines] == [True]
    monkeypatch.setattr(object_store, "NOTICE_S", 60.0)
    monkeypatch.setattr(object_store, "LAST_ATTEMPT_S", 0.0)
    Failing.failures = 3
    with pytest.raises(OSError, match="the server is busy"):
        store.read("name")
    assert Failing.failures == 2
    (tmp_path / "file").touch()
    store.upload(tmp_path / "file", "name")  # which may take long
    assert Failing.failures == 0


def test_a_server_that_accepts_connections_and_never_answers_is_given_up_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By every client of the process: fsspec knows obstore's class from the second one on."""
    limit: Any = {"retry_timeout": timedelta(seconds=0.1)}
    monkeypatch.setattr(object_store, "RETRY_OF_OBSTORE", limit)
    monkeypatch.setattr(object_store, "LAST_ATTEMPT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        for name, value in {**client_variables(address), "AWS_TIMEOUT": "200ms"}.items():
            monkeypatch.setenv(name, value)
        for store in (ObjectStore("s3://bucket/run"), ObjectStore("s3://bucket/run")):
            calls = (store.sizes, lambda s=store: s.read("x"), lambda s=store: s.create("x", b""))
            for call in calls:
                with pytest.raises(OSError, match=r"^s3://bucket/run/x?: .*HTTP error") as raised:
                    call()
                assert "max_retries" not in str(raised.value)  # of which obstore has ten


def test_a_scheme_without_a_package_names_the_extra_to_install() -> None:
    with raises_problem("store-package-missing", contains="gcsfs"):
        ObjectStore("abfs://container/folder")
    with raises_problem("store-unusable", contains="unheard-of://x"):
        ObjectStore("unheard-of://x")
