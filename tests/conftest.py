"""Fixtures for all tests, and the device that all tests use."""

from __future__ import annotations

import gc
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.proofs.marked import MARKERS

# A shell without job control starts background jobs with SIGINT ignored, and the processes that the
# tests start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tests start hundreds of processes; without bytecode caches each would compile its modules, and
# every worker would rewrite the assertions of all tests.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# The same examples in every run, and no time limit per example, which a busy machine would exceed.
settings.register_profile("steady", derandomize=True, deadline=None, database=None)
settings.load_profile("steady")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--on-cpu",
        action="store_true",
        help="run the tests marked gpu on the CPU, too, which tries the tests and not the device",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The tests run on the CPU even where there is an accelerator, except those marked `gpu`, which
    # `-m gpu` selects. DeepSpeed reads this variable when it selects its accelerator, and the
    # processes that tests start inherit it.
    if config.option.markexpr != "gpu" or config.option.on_cpu:
        os.environ.setdefault("DS_ACCELERATOR", "cpu")


def pytest_collection() -> None:
    # Until all files are imported, nothing is garbage.
    gc.disable()


def pytest_collection_finish() -> None:
    # The libraries are a million objects, which each collection of the oldest ones would visit. By
    # the default thresholds, what tests import and cache later would take a tenth of their time.
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 20)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        # For the record of the tests that `make test` leaves out.
        item.user_properties += [(each, "1") for each in MARKERS if item.get_closest_marker(each)]
    _skip_without_accelerator(config, items)
    if on_disk := [item for item in items if item.get_closest_marker("libaio")]:
        from megatron_ds.planning import swap_disk

        if (problem := swap_disk.find_problem()) is not None:
            for item in on_disk:
                item.add_marker(pytest.mark.skip(reason=problem.render()))


def _skip_without_accelerator(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [(item, mark) for item in items if (mark := item.get_closest_marker("gpu"))]
    if not marked or config.option.on_cpu or _has_accelerator():
        return
    for item, mark in marked:
        item.add_marker(pytest.mark.skip(reason=f"needs an accelerator: {mark.kwargs['reason']}"))


def _has_accelerator() -> bool:
    if os.environ.get("DS_ACCELERATOR") == "cpu":
        return False
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() != "cpu")


@pytest.fixture
def run_tool(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs a tool in this process, which must return `status`. Returns what it prints."""

    def run(tool: Any, *arguments: object, status: int = 0) -> Any:
        found = tool.main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        assert found == status, printed
        return printed

    return run


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    from megatron_ds.launch.cpp_ops import leave_out_shared_memory_op

    leave_out_shared_memory_op()
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="session")
def megatron_checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints that Megatron's programs wrote, with the logits of their own models, and data."""
    return extracted("megatron_checkpoints.tar.xz", tmp_path_factory.mktemp("megatron"))


def extracted(name: str, folder: Path) -> Path:
    """The folder, with the files of an archive of tests/golden."""
    with tarfile.open(REPOSITORY / "tests" / "golden" / name) as archive:
        if hasattr(tarfile, "data_filter"):  # since Python 3.11.4
            archive.extraction_filter = staticmethod(tarfile.data_filter)
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real text and vocabularies next to the checkout; skips where it is absent."""
    folder = REPOSITORY.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the folder of test data, shared/data next to the checkout, is missing")
    return folder
