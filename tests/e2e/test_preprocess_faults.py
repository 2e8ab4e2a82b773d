"""Preprocessing processes that lose a worker or run out of disk space; memory use.

Each leaves nothing under the final names and can be resumed.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import REPOSITORY
from tests.faults import faulty_disk
from tests.proofs.cases import with_proofs

DOCUMENTS = 20_000
TOOL = """
import contextlib, multiprocessing, resource, sys
from megatron_ds.fileio import resumable
from megatron_ds.preprocess import command as preprocess_data

resumable.COMMIT_SECONDS = 0.0

@contextlib.contextmanager
def progress(task, total_bytes, log_interval):
    def update(documents, input_bytes, description):
        if 0 < WORKER_DIES_AT <= documents and not killed:
            killed.append(multiprocessing.active_children()[0].kill())
        print("at", documents, flush=True)
    yield update

WORKER_DIES_AT, killed = int(sys.argv[1]), []
preprocess_data.progress = progress
code = preprocess_data.main(sys.argv[2:])
with open("/proc/self/status") as file:  # of this process only, unlike getrusage
    peak = next(line.split()[1] for line in file if line.startswith("VmHWM"))
print("peaks", peak, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(code)
"""


def corpus(folder: Path, documents: int = DOCUMENTS) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(f'{{"text": "{n % 100} {n % 7}"}}\n' for n in range(documents)))
    return path


def start(
    folder: Path, *flags: str, worker_dies_at: int = 0, **environment: str
) -> subprocess.Popen[str]:
    known = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "100", "--append-eod"]
    files = ["--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / "out")]
    return subprocess.Popen(
        [sys.executable, "-c", TOOL, str(worker_dies_at), *files, *known, *flags],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pair(folder: Path) -> dict[str, bytes]:
    """Files under their final names, by suffix."""
    return {
        path.suffix: path.read_bytes() for path in folder.glob("out_text_document.[bi][id][nx]")
    }


def finish(folder: Path) -> str:
    """Resumes to the end. Returns stderr."""
    process = start(folder, "--resume", "--workers", "1")
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert f"Processed {DOCUMENTS} documents" in stdout
    return stderr


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("uninterrupted")
    corpus(folder)
    finish(folder)
    return pair(folder)


def test_run_with_a_killed_worker_resumes(tmp_path: Path, uninterrupted: dict[str, bytes]) -> None:
    corpus(tmp_path)
    process = start(tmp_path, "--workers", "2", "--chunk-size", "64", worker_dies_at=5000)
    stderr = process.communicate()[1]
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert "worker-process-lost" in stderr
    assert str(tmp_path / "out.work") in stderr
    assert pair(tmp_path) == {}
    assert "resuming after" in finish(tmp_path)
    assert pair(tmp_path) == uninterrupted


@pytest.mark.parametrize(
    "part",
    with_proofs([f"document.{end}" for end in ("bin", "idx", "documents")], ["document.idx"]),
)
def test_run_with_a_full_disk_resumes(
    tmp_path: Path, uninterrupted: dict[str, bytes], part: str
) -> None:
    library = str(faulty_disk())
    corpus(tmp_path)
    fault = f"write:{errno.ENOSPC}:50000:{part}"
    process = start(tmp_path, "--workers", "1", LD_PRELOAD=library, DISK_FAULT=fault)
    stderr = process.communicate()[1]
    assert process.returncode == 1
    assert "Traceback" not in stderr
    assert "No space left on device: '" in stderr
    assert f"{part}'" in stderr
    assert str(tmp_path / "out.work") in stderr
    assert "--output-prefix" in stderr
    assert pair(tmp_path) == {}
    assert "resuming after" in finish(tmp_path)
    assert pair(tmp_path) == uninterrupted


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    """Memory of the process and of its worker, for tiny documents, whose index is larger.

    Claim (data): preprocessing ten times as many documents takes the same memory
    """
    peaks = []
    for documents in (30_000, 300_000):
        corpus(tmp_path, documents)
        process = start(tmp_path, "--workers", "1", "--overwrite")
        stdout = process.communicate()[0]
        assert process.returncode == 0
        peaks.append([int(number) for number in stdout.splitlines()[-1].split()[1:]])
    for small, large in zip(*peaks, strict=True):
        assert large < 1.2 * small, peaks
