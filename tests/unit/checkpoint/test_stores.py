"""Checkpoints in a store: one process, an engine that writes two files, a store in memory.

`Flaky` fails, or ends the process, at any of its operations.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

from megatron_ds.checkpoint.files.collective_io import CollectiveIO
from megatron_ds.checkpoint.files.native_settings import select_native
from megatron_ds.checkpoint.folders import run_lock
from megatron_ds.checkpoint.folders.run_lock import LOCK, acquire_lock
from megatron_ds.checkpoint.manager import CheckpointManager
from megatron_ds.checkpoint.metadata import list_checkpoints, manifest_text, read_manifest
from megatron_ds.checkpoint.run_checkpoints import RunCheckpoints
from megatron_ds.checkpoint.save_steps import SaveError
from megatron_ds.checkpoint.store import lock as store_lock
from megatron_ds.checkpoint.store.claim import claimed_stores
from megatron_ds.checkpoint.store.lock import StoreLockFile
from megatron_ds.checkpoint.store.mirror import fetch
from megatron_ds.config import MODEL_SIZE_FIELDS, Config
from megatron_ds.fileio import object_store
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.fileio.object_store import ObjectStore
from megatron_ds.loading.locations import staged_location
from megatron_ds.loading.plan import make_plan
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import TrainState
from tests.problems import codes, raises_problem
from tests.unit.checkpoint.fakes import (
    FakeEngine,
    flip_a_bit,
    flipped,
    load,
    save,
    state_at,
    truncated,
)


class Killed(BaseException):
    """The end of the process at this point."""


WRITES = ("pipe_file", "put_file", "rm_file")
READS = ("cat_file", "find")


class Flaky(MemoryFileSystem):
    """A store whose operations are counted, and replaced by an error from one on."""

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    before: Callable[[str], None] = staticmethod(lambda name: None)


def _watched(name: str) -> Any:
    def call(self: Flaky, path: Any, *args: Any, **kwargs: Any) -> Any:
        Flaky.before(name)
        return getattr(MemoryFileSystem, name)(self, path, *args, **kwargs)

    return call


for _name in (*WRITES, *READS):
    setattr(Flaky, _name, _watched(_name))


@contextmanager
def failing_from(number: int, error: BaseException, names: tuple[str, ...]) -> Iterator[list[str]]:
    """Raises an error at the n-th of these operations and all later ones; yields what failed."""
    numbers = itertools.count()
    failed = list[str]()

    def before(name: str) -> None:
        if name in names and next(numbers) >= number:
            failed.append(name)
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Flaky, "before", staticmethod(before))
        yield failed


@pytest.fixture(autouse=True)
def quick_store(monkeypatch: pytest.MonkeyPatch) -> None:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    Flaky.store.clear()
    monkeypatch.setattr(object_store, "FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr(store_lock, "SETTLE_S", 0.0)
    # A heartbeat would be an operation of the store.
    for name, value in (("ENDING_S", 0.3), ("FOREIGN_SILENCE_S", 0.3), ("HEARTBEAT_S", 60.0)):
        monkeypatch.setattr(run_lock, name, value)


URL = "flaky://bucket/run"
Runs = Callable[..., Any]


@pytest.fixture
def run(one_process: None, config: Config, logged: list[str], tmp_path: Path) -> Callable[..., Any]:
    """with run(node, **options) as manager: a run on a node with this name."""

    @contextmanager
    def start(node: str = "a", **options: Any) -> Iterator[CheckpointManager]:
        options = {
            "save": URL,
            "load": URL,
            "checkpoint_staging_dir": str(tmp_path / node),
        } | options
        given = dataclasses.replace(config.with_values(options), given=frozenset(MODEL_SIZE_FIELDS))
        staged, plan, problems = make_plan(given)
        assert not problems
        ranks = CollectiveIO()
        folders = plan.folders
        with claimed_stores(folders, ranks, logged.append) as stores:
            mesh = Mesh.build(1)
            run = RunCheckpoints(staged, mesh, logged.append, ranks, folders, stores=stores)
            yield CheckpointManager(run, stores.lock)

    return start


def names_in_store(folder: str = "") -> set[str]:
    return {name.partition("/")[0] for name in ObjectStore(URL).sizes(folder)} - {LOCK}


def test_a_save_uploads_a_checkpoint_and_two_pointers(run: Runs, logged: list[str]) -> None:
    with run() as manager:
        save(manager, 4, 8)
        store = ObjectStore(URL)
        assert names_in_store() == {
            "global_step4",
            "global_step8",
            "latest",
            "latest_checkpointed_iteration.txt",
        }
        assert store.read("latest") == b"global_step8"
        assert {name.partition("/")[2] for name in store.sizes("global_step8")} == {
            "below/optim_states.pt",
            "model_states.pt",
            "run.json",
            "manifest.json",
        }
        staged = manager.newest
        assert (staged / "model_states.pt").is_file()
        assert not (staged.parent / "global_step4" / "model_states.pt").exists()
    assert f"successfully saved checkpoint at iteration       8 to {URL}" in "".join(logged)
    assert LOCK not in store.sizes()
    with run("another") as manager:
        state, engine = load(manager)
        assert (state, engine.content) == (state_at(8), "of iteration 8")


def test_files_that_a_node_has_intact_are_not_downloaded(run: Runs, logged: list[str]) -> None:
    with run() as manager:
        save(manager, 4)
    for damaged in (False, True):
        logged.clear()
        with run() as manager:
            (path,) = list_checkpoints(Path(manager.saving._folder.folder))
            if damaged:
                flip_a_bit(path / "model_states.pt")
            assert load(manager)[1].content == "of iteration 4"
        assert any("downloaded" in line for line in logged) == damaged


def test_a_download_leaves_a_file_that_is_being_read(run: Runs, tmp_path: Path) -> None:
    """Two runs on a node load one URL: the second one begins while the first one downloads."""
    with run() as manager:
        save(manager, 4)
        staged = manager.newest
    file = staged / "model_states.pt"
    store = ObjectStore(URL)
    content = file.read_bytes()
    file.write_bytes(b"partial")
    reader = file.open("rb")
    with reader:
        assert fetch(store, staged, ["model_states.pt"]) == len(content)
        assert reader.read() == b"partial"
    assert file.read_bytes() == content
    assert {path.name for path in staged.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize(
    ("kind", "again"),
    [
        ("crash", True),
        ("error", False),
        pytest.param("crash", False, marks=pytest.mark.proof),
        pytest.param("error", True, marks=pytest.mark.proof),
    ],
)
def test_a_store_that_fails_at_any_operation_loses_no_older_checkpoint(
    kind: str, again: bool, run: Runs, tmp_path: Path, logged: list[str]
) -> None:
    """The first write of the save fails and all after it, then the second, and so on.

    Claim (checkpoints): a store that fails, or a process that ends, at any operation of an upload
    leaves the older checkpoints intact
    """
    failed = 0
    for number in range(60):
        Flaky.store.clear()
        shutil.rmtree(tmp_path / "a", ignore_errors=True)
        error = OSError("the store is down") if kind == "error" else Killed()
        raised: BaseException | None = None
        with run() as manager:
            save(manager, 4, *([8] if again else []))
            logged.clear()
            with failing_from(number, error, WRITES) as broken:
                try:
                    save(manager, 8)
                except (SaveError, Killed) as problem:
                    raised = problem
            if kind == "error" and isinstance(raised, SaveError):
                assert raised.problem.code == "save-failed"
                assert "the store is down" in str(raised.problem)
        if not broken:
            break
        failed += 1
        has_new = "global_step8/manifest.json" in ObjectStore(URL).sizes()
        with run("another") as manager:
            state, engine = load(manager)
            assert engine.content == f"of iteration {state.iteration}"
            # The manifest makes a checkpoint complete; an error after it is a warning.
            assert state.iteration == (8 if has_new else 4)
            if raised is None:
                assert has_new
                assert any("[save-pointers-failed]" in line for line in logged)
            save(manager, 12)
        assert names_in_store("") <= {
            "global_step4",
            "global_step8",
            "global_step12",
            "latest",
            "latest_checkpointed_iteration.txt",
        }
        shutil.rmtree(tmp_path / "another")
    assert failed >= (10 if again else 7)


@pytest.mark.parametrize("place", ["flaky://bucket/weights", "folder"])
def test_a_run_of_a_url_starts_from_pretrained_weights_and_then_continues(
    place: str, run: Runs, tmp_path: Path, logged: list[str]
) -> None:
    weights = place if "://" in place else str(tmp_path / place)
    with run("another", save=weights, load=weights) as manager:
        save(manager, 4)
    logged.clear()
    with run(pretrained_checkpoint=weights) as manager:
        state, engine = load(manager)
        assert state == TrainState()
        assert engine.resharded is not None
        assert f"from {weights} at" in "".join(logged)
        save(manager, 2)
    with run(pretrained_checkpoint=weights) as manager:
        assert load(manager)[0] == state_at(2)


def test_a_save_after_one_without_pointers_is_selected(run: Runs, logged: list[str]) -> None:
    with run() as manager:
        with failing_from(0, OSError("the store is down"), ("rm_file",)):
            save(manager, 4)
        assert any("[save-pointers-failed]" in line for line in logged)
        save(manager, 8)
    with run("another") as manager:
        assert load(manager)[0] == state_at(8)


def test_keep_last_keeps_that_many_in_the_store_and_on_the_node(run: Runs) -> None:
    with run(keep_last=2) as manager:
        save(manager, 2, 4, 6)
        assert {name for name in names_in_store() if "global" in name} == {
            "global_step4",
            "global_step6",
        }
        folder = Path(manager.saving._folder.folder)
        assert [path.name for path in list_checkpoints(folder)] == ["global_step6", "global_step4"]


def test_a_crash_during_the_removal_leaves_no_partial_checkpoint(run: Runs) -> None:
    with run(keep_last=1) as manager:
        save(manager, 2)
        engine = FakeEngine()
        for number in itertools.count():
            with failing_from(number, Killed(), ("rm_file",)) as broken, suppress(Killed):
                manager.saving.save(engine, state_at(4 + number))
            complete = [n for n in ObjectStore(URL).sizes() if n.endswith("manifest.json")]
            for name in complete:
                folder = name.partition("/")[0]
                assert len(ObjectStore(URL).sizes(folder)) >= 4, folder
            if not broken:
                break
            manager.saving._current = None
    assert number > 2


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "no manifest"])
def test_a_damaged_checkpoint_is_skipped(
    damage: str, run: Runs, logged: list[str], tmp_path: Path
) -> None:
    """Claim (checkpoints): a damaged object is found and the checkpoint before it is loaded"""
    with run() as manager:
        save(manager, 4, 8)
    shutil.rmtree(tmp_path / "a")
    store = ObjectStore(URL)
    name = "global_step8/model_states.pt"
    if damage in ("flipped", "truncated"):
        change = flipped if damage == "flipped" else truncated
        store.write(name, change(store.read(name), random.Random(0)))
    else:
        store.remove(name if damage == "missing" else "global_step8/manifest.json")
    logged.clear()
    with run() as manager:
        state, engine = load(manager)
    assert (state, engine.content) == (state_at(4), "of iteration 4")
    code = "checkpoint-skipped" if damage != "no manifest" else "checkpoint-pointer-ignored"
    assert [line for line in logged if f"[{code}]" in line]
    location = staged_location(URL, str(tmp_path / "tool"), logged.append)
    assert select_native(Path(location), logged.append).iteration == 4


@pytest.mark.parametrize("seen", [1, 2], ids=["at once", "after its manifest"])
def test_a_checkpoint_that_is_removed_while_it_is_looked_at_is_left_out(
    seen: int, run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run() as manager:
        save(manager, 4, 8)
    staging = str(tmp_path / "tool")
    looks = itertools.count(1)

    def remove(name: str) -> None:
        if name == "cat_file" and next(looks) == seen:
            for key in [key for key in Flaky.store if "global_step4/" in key]:
                del Flaky.store[key]

    with monkeypatch.context() as patch:
        patch.setattr(Flaky, "before", staticmethod(remove))
        location = staged_location(URL, staging, print)
    assert select_native(Path(location), print).iteration == 8


def test_tools_load_a_run_one_checkpoint_or_any_folder(run: Runs, tmp_path: Path) -> None:
    with run() as manager:
        save(manager, 4, 8)
    warnings: list[str] = []
    staging = str(tmp_path / "tool")
    assert select_native(Path(staged_location(URL, staging, print)), print).iteration == 8
    one = staged_location(f"{URL}/global_step4", staging, warnings.append)
    assert select_native(Path(one), warnings.append).iteration == 4
    ObjectStore("flaky://bucket/model").write("below/config.json", b"{}")
    other = staged_location("hf:flaky://bucket/model", staging, warnings.append)
    assert other.startswith("hf:")
    assert (Path(other.removeprefix("hf:")) / "below/config.json").read_text() == "{}"
    assert staged_location("hf:folder", staging, warnings.append) == "hf:folder"
    assert not warnings


@pytest.mark.parametrize(
    "name", ["{victim}", "../../../victim.pt", "tokenizer/../../../../escaped"]
)
def test_names_of_a_store_neither_write_nor_delete_outside_the_staging_folder(
    name: str, run: Runs, tmp_path: Path
) -> None:
    """Claim (checkpoints): names of objects and manifests in a store neither write nor delete a
    file outside the staging folder"""
    victim = tmp_path / "victim.pt"
    victim.write_text("mine")
    name = name.format(victim=victim)
    with run() as manager:
        save(manager, 4, 8)
        # What anyone who can write to the bucket does to the older checkpoint.
        (*_, older) = list_checkpoints(Path(manager.saving._folder.folder))
        files = {**read_manifest(older), name: FileRecord.of(b"theirs")}
        manifest = manifest_text(files).encode()
        ObjectStore(URL).write("global_step4/manifest.json", manifest)
        Flaky.store[f"{URL}/global_step4/{name}"] = MemoryFile(None, "", b"theirs")
    staged_location(f"{URL}/global_step4", str(tmp_path / "one"), print)
    for path in tmp_path.rglob("model_states.pt"):
        path.unlink()
    with run(ckpt_step=4) as manager, raises_problem("checkpoint-damaged"):
        load(manager)
    with run() as manager:
        assert load(manager)[0] == state_at(8)
        save(manager, 12)
    for name in ("../escaped", "config.json"):
        Flaky.store[f"flaky://bucket/weights/{name}"] = MemoryFile(None, "", b"theirs")
    staged_location("hf:flaky://bucket/weights", str(tmp_path / "tool"), print)
    assert victim.read_text() == "mine"
    assert not list(tmp_path.rglob("escaped"))


def test_a_url_is_owned_by_one_run(run: Runs, logged: list[str]) -> None:
    """Claim (checkpoints): one run at a time owns a `--save` URL"""
    store = ObjectStore(URL)
    with run():
        owner = store.read(LOCK)
        with raises_problem("save-folder-in-use", "save", contains=URL), run("another"):
            pass
        assert store.read(LOCK).startswith(owner.partition(b"\n")[0])
    assert LOCK not in store.sizes()


def test_a_repeated_request_for_the_lock_finds_its_own(
    logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the first one was lost, and the client has sent another one."""
    create = ObjectStore.create

    def repeated(store: ObjectStore, name: str, content: bytes) -> bool:
        create(store, name, content)
        return create(store, name, content)

    monkeypatch.setattr(ObjectStore, "create", repeated)
    lock = acquire_lock(StoreLockFile(ObjectStore(URL)), logged.append)
    assert lock.is_held()
    lock.release()
    assert not logged


def test_a_silent_owner_elsewhere_loses_the_url_and_a_lively_one_keeps_it(
    run: Runs, logged: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_lock, "HEARTBEAT_S", 0.05)
    here = run_lock.Owner.here()
    elsewhere = dataclasses.replace(here, host="elsewhere", location="elsewhere 1 2")
    with monkeypatch.context() as patch:
        patch.setattr(run_lock.Owner, "here", lambda: elsewhere)
        lock = acquire_lock(StoreLockFile(ObjectStore(URL)), logged.append)
    with raises_problem("save-folder-in-use", "save", contains="on elsewhere"), run():
        pass
    assert lock.is_held()
    lock._released.set()  # the process is suspended: it gives no more signs of life
    lock._thread.join()
    with run() as manager:
        assert not lock.is_held()
        save(manager, 4)
        ObjectStore(URL).write(LOCK, b"of another run")
        with pytest.raises(SaveError, match=r"\[save-folder-lost\]"):
            save(manager, 8)
    assert ObjectStore(URL).read(LOCK) == b"of another run"


def test_what_another_run_saved_before_it_released_the_url_is_loaded(
    run: Runs, config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It saved after this run had looked at the store for the first time."""
    from megatron_ds.checkpoint.store import claim as run_stores

    with run() as manager:
        save(manager, 4)
    original = run_stores.staging.mirror
    with run("another") as manager:
        save(manager, 8)
        copy = dict(Flaky.store)
    Flaky.store.clear()
    Flaky.store.update({k: v for k, v in copy.items() if "step8" not in k and LOCK not in k})

    def saved_meanwhile(*args: Any, **kwargs: Any) -> None:
        Flaky.store.update({k: v for k, v in copy.items() if LOCK not in k})
        original(*args, **kwargs)

    monkeypatch.setattr(run_stores.staging, "mirror", saved_meanwhile)
    with run("third") as manager:
        assert load(manager)[0] == state_at(8)


def test_urls_that_cannot_be_used_are_problems_of_their_flags(
    config: Config, tmp_path: Path
) -> None:
    def problems(**options: Any) -> list[Any]:
        options.setdefault("checkpoint_staging_dir", str(tmp_path))
        given = dataclasses.replace(config.with_values(options), given=frozenset(MODEL_SIZE_FIELDS))
        return make_plan(given)[2]

    assert not problems()
    found = problems(save="unheard-of://x", load="gs+other://y")
    assert codes(found) == ["store-unusable", "store-unusable"]
    assert [each.fields for each in found] == [("save",), ("load",)]
    (once,) = problems(save="unheard-of://x", load="unheard-of://x")
    assert once.fields == ("save",)
    (one,) = problems(save=None, load=f"{URL}/global_step4")
    assert one.code == "load-is-one-checkpoint"
    (empty,) = problems(save=None, load="flaky://bucket/empty", finetune=True)
    assert empty.code == "weights-format-unknown"
    assert "flaky://bucket/empty" in empty
    with failing_from(0, PermissionError("no credentials"), READS):
        (denied,) = problems(save=URL, load=None)
    assert (denied.code, denied.fields) == ("store-unusable", ("save",))
    assert "no credentials" in denied
    (tmp_path / "file").touch()
    (unusable,) = problems(save=URL, load=None, checkpoint_staging_dir=str(tmp_path / "file"))
    assert unusable.code == "staging-folder-unusable"
