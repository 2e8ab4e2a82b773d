from __future__ import annotations

import errno
import io
import os
import sys
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import pytest

from megatron_ds.data.gpt_dataset import GPTDataset
from megatron_ds.data.indexed_dataset import IndexedDataset
from megatron_ds.launch import device, distributed, environment, output
from megatron_ds.launch.extension_locks import stale_locks
from megatron_ds.training.jsonl_logger import JsonLines


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that no launcher started, as the script `pretrain_gpt.py`."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "argv", ["folder/pretrain_gpt.py"])
    return monkeypatch


@pytest.fixture
def surroundings(alone: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Nothing that preparing the environment sets stays set after the test."""
    alone.setenv("PATH", os.environ["PATH"])
    alone.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    alone.setattr(environment, "_silence_libraries", lambda: None)
    return alone


def test_a_stale_lock_ends_the_program_by_name(tmp_path: Path) -> None:
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()

    with pytest.raises(SystemExit) as ended:
        environment.refuse_stale_locks(stale_locks(tmp_path))

    # A text is printed, and the exit status is 1.
    assert isinstance(ended.value.code, str)
    assert f"\n  {lock}\n" in ended.value.code
    assert "tools/build_ops.py" in ended.value.code


def test_without_a_stale_lock_the_program_goes_on(tmp_path: Path) -> None:
    environment.refuse_stale_locks(stale_locks(tmp_path))


def test_a_virtual_environment_keeps_its_ops(
    surroundings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    surroundings.setattr(sys, "prefix", str(tmp_path / "venv"))
    surroundings.setattr(sys, "executable", str(tmp_path / "venv" / "bin" / "python"))

    folder = environment.prepare_environment()

    assert folder == tmp_path / "venv" / "torch_extensions"
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(folder)
    assert os.environ["PATH"].split(os.pathsep)[0] == str(tmp_path / "venv" / "bin")


def test_without_a_virtual_environment_torchs_folder_is_taken(
    surroundings: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    surroundings.setattr(sys, "prefix", sys.base_prefix)
    surroundings.setenv("HOME", str(tmp_path))

    assert environment.prepare_environment() == tmp_path / ".cache" / "torch_extensions"
    assert "TORCH_EXTENSIONS_DIR" not in os.environ


def test_the_users_folder_of_ops_is_taken(surroundings: pytest.MonkeyPatch, tmp_path: Path) -> None:
    surroundings.setattr(sys, "prefix", str(tmp_path / "venv"))
    surroundings.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "mine"))

    assert environment.prepare_environment() == tmp_path / "mine"


@pytest.mark.usefixtures("alone")
def test_a_users_error_is_one_message_and_exit_1(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended, output.exit_on_user_error():
        IndexedDataset(tmp_path / "none")

    assert ended.value.code == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert err == f"pretrain_gpt.py: there is no file {tmp_path / 'none.idx'}\n"


def test_errors_of_other_code_and_other_kinds_keep_their_tracebacks(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="invalid literal"), output.exit_on_user_error():
        int("x")
    with pytest.raises(IndexError, match="of a dataset of 0"), output.exit_on_user_error():
        GPTDataset(MagicMock(), MagicMock(), 5)[0]

    assert capfd.readouterr().err == ""


def test_a_reader_that_is_gone_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the `tee` behind a pipe at once, while the run still has to save."""
    reading, writing = os.pipe()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        output.print_on_rank("heard")
        assert os.read(reading, 100) == b"heard\n"
        os.close(reading)
        output.print_on_rank("to nobody")
        output.print_on_rank("to nobody either")


def test_torchruns_summary_gets_the_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    output.write_torchelastic_error_file("rank 1: failed: words")
    failure = ProcessFailure(local_rank=1, pid=5, exitcode=1, error_file=str(file))
    assert failure.message["extraInfo"]["py_callstack"] == "rank 1: failed: words"
    assert failure.timestamp > 0

    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    output.write_torchelastic_error_file("other launchers have no summary")


def test_a_run_of_one_process_has_nobody_to_watch(alone: pytest.MonkeyPatch) -> None:
    assert distributed.exchange_process_info() == (None, {})


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_peak_memory_is_counted_from_its_making_and_outlives_the_tensors() -> None:
    peak = device.PeakMemory()
    start = peak.bytes()
    np.ones(2**23)  # 64 MiB, gone at once
    after = peak.bytes()
    assert start is not None
    assert after is not None
    assert after - start > 50 * 2**20


def test_a_screen_that_is_no_terminal_has_a_hundred_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    assert output.screen() == (100, False)


def test_a_closed_terminal_ends_no_run(alone: pytest.MonkeyPatch) -> None:
    ours, theirs = os.openpty()
    with open(theirs, "w") as terminal:
        os.close(ours)
        alone.setattr(sys, "stdout", terminal)
        alone.setattr(sys, "stderr", terminal)
        output.print_on_rank("a line of the log")
        output.print_error("why the run ends")


def test_a_full_disk_costs_the_log_a_line_and_not_the_run(alone: pytest.MonkeyPatch) -> None:
    class Disk(io.StringIO):
        full = True

        def write(self, text: str) -> int:
            if self.full:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    disk = Disk()
    alone.setattr(sys, "stderr", disk)
    output.print_error("lost")
    disk.full = False
    output.print_error("there is room")
    assert disk.getvalue() == "there is room\n"


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError) as of_the_package:
        JsonLines(tmp_path / "file" / "folder" / "metrics.jsonl", 0)
    with pytest.raises(OSError) as of_another:
        (tmp_path / "file" / "folder").mkdir()

    assert output.is_user_error(of_the_package.value)
    assert not output.is_user_error(of_another.value)
