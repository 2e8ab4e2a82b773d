"""Files of other programs: their classes are not imported, and none of them runs code."""

from __future__ import annotations

import argparse
import enum
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import filesystem, metadata

from megatron_ds.conversion.safe_unpickle import StandIn, read_dcp_metadata, read_foreign
from tests.problems import raises_problem


class Call:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def attacks(trap: Path) -> dict[str, Any]:
    """Objects that create a folder when they are unpickled, or would lead to it."""
    code = f"__import__('os').mkdir({str(trap)!r})"
    return {
        "posix.mkdir": Call(os.mkdir, str(trap)),
        "posix.system": Call(os.system, f"mkdir {trap}"),
        "eval": Call(eval, code),
        "exec": Call(exec, code),
        "subprocess.Popen": Call(subprocess.Popen, ["mkdir", str(trap)]),
        "io.open": Call(open, str(trap), "w"),
        "__import__": Call(getattr, Call(__import__, "os"), "mkdir"),
        "formats.foreign_pickle.StandIn": Call(StandIn),
    }


ATTACKS = list(attacks(Path("trap")))


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("attack", ATTACKS)
def test_a_file_cannot_run_code(tmp_path: Path, attack: str, is_zip: bool) -> None:
    """Claim (checkpoints): a foreign checkpoint cannot execute code"""
    trap = tmp_path / "sprung"
    path = tmp_path / "model_optim_rng.pt"
    content = {"args": argparse.Namespace(rank=0), "model": attacks(trap)[attack]}
    torch.save(content, path, _use_new_zipfile_serialization=is_zip)

    with raises_problem("foreign-class-rejected", contains=str(path)) as raised:
        read_foreign(path)

    assert not trap.exists()
    assert attack.rpartition(".")[2].partition(" ")[0] in str(raised.problem)


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_metadata_cannot_run_code(tmp_path: Path, attack: str, protocol: int) -> None:
    """Claim (checkpoints): a foreign checkpoint cannot execute code"""
    trap = tmp_path / "sprung"
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps({"state": attacks(trap)[attack]}, protocol))

    with raises_problem("foreign-class-rejected", contains=str(path)):
        read_dcp_metadata(path)

    assert not trap.exists()


def test_metadata_cannot_reach_a_function_through_a_listed_class(tmp_path: Path) -> None:
    """A name with dots leads from a class to the globals of its module."""
    path = tmp_path / ".metadata"
    path.write_bytes(
        b"\x80\x04" + opcodes(metadata.__name__, "Metadata.__init__.__globals__") + b"."
    )

    with raises_problem("foreign-class-rejected", contains="__globals__"):
        read_dcp_metadata(path)


def opcodes(*names: str) -> bytes:
    """Pushes the object of a module."""
    return b"".join(b"\x8c" + bytes([len(name)]) + name.encode() for name in names) + b"\x93"


@pytest.mark.parametrize(
    ("target", "name", "call"),
    [
        (metadata, "MetadataIndex", b""),
        (metadata, "_MEM_FORMAT_ENCODING", b""),
        (metadata, "_MEM_FORMAT_ENCODING", b"K\x00\x85R"),
        (torch.serialization, "_get_layout", b""),
        (torch, "Size", b""),
        (torch, "float32", b""),
    ],
)
def test_metadata_cannot_change_objects_of_torch(
    tmp_path: Path, target: ModuleType, name: str, call: bytes
) -> None:
    """By the opcode that sets the attributes of an object."""
    found = getattr(target, name)
    live = found(0) if call else found
    path = tmp_path / ".metadata"
    state = b"N}" + b"\x8c\x07changed" + b"K\x01s\x86"
    path.write_bytes(b"\x80\x04" + opcodes(target.__name__, name) + call + state + b"b.")

    with raises_problem("tensor-file-unreadable"):
        read_dcp_metadata(path)

    assert not hasattr(live, "changed")


@pytest.mark.parametrize(
    "change",
    [
        {"storage_data": 5},
        {"storage_data": {}},
        {"storage_data": {metadata.MetadataIndex("weight"): 5}},
        {"storage_data": {5: filesystem._StorageInfo("__0_0.distcp", 0, 9)}},
        {"storage_data": {metadata.MetadataIndex("x"): filesystem._StorageInfo(5, 0, 9)}},
        {"storage_data": {metadata.MetadataIndex("x"): filesystem._StorageInfo("", 0, 9)}},
        {"storage_data": {metadata.MetadataIndex("x"): filesystem._StorageInfo("x", -1, 9)}},
        {"storage_data": {metadata.MetadataIndex("x"): filesystem._StorageInfo("x", 0, "y")}},
        {"state_dict_metadata": 5},
        {"state_dict_metadata": {"weight": 5}},
        {"size": (-1,)},
        {"size": ("x",)},
        {"size": torch.Size([2**40, 0])},
        {"size": torch.Size([2**62, 2**62])},
        {"chunks": 5},
        {"chunks": [5]},
        {"properties": 5},
    ],
)
def test_malformed_metadata_is_rejected(tmp_path: Path, change: dict[str, Any]) -> None:
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    path = tmp_path / ".metadata"
    read_dcp_metadata(path)
    found = pickle.loads(path.read_bytes())
    for name, value in change.items():
        setattr(found if hasattr(found, name) else found.state_dict_metadata["weight"], name, value)
    path.write_bytes(pickle.dumps(found))

    with raises_problem("tensor-file-unreadable", contains=str(path)):
        read_dcp_metadata(path)


def test_metadata_of_every_version_of_python_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python 3.11.0 to 3.11.3 pickle a member of an enum as a call of getattr.

    Claim (command-line): checkpoints of every version of Python are read
    """
    kind = metadata._MEM_FORMAT_ENCODING
    monkeypatch.setattr(kind, "__reduce_ex__", lambda self, _: (getattr, (kind, self.name)))
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    assert b"getattr" in (tmp_path / ".metadata").read_bytes()

    assert list(read_dcp_metadata(tmp_path / ".metadata").state_dict_metadata) == ["weight"]


def test_metadata_cannot_name_a_file_elsewhere(tmp_path: Path) -> None:
    dcp.save({"weight": torch.ones(2)}, checkpoint_id=tmp_path / "good", no_dist=True)
    found = read_dcp_metadata(tmp_path / "good" / ".metadata")
    for stored in found.storage_data.values():
        stored.relative_path = "../../secret"
    found.storage_meta = None
    path = tmp_path / ".metadata"
    path.write_bytes(pickle.dumps(found))

    with raises_problem("tensor-file-unreadable", contains="../../secret"):
        read_dcp_metadata(path)


def test_classes_of_megatron_are_read_without_being_imported(tmp_path: Path) -> None:
    names = ("megatron", "megatron.core", "megatron.core.enums")
    modules = {name: ModuleType(name) for name in names}
    module = modules["megatron.core.enums"]
    module.ModelType = enum.Enum("ModelType", {"encoder": 1}, module=module.__name__)
    values = np.arange(3.0)
    content = {
        "args": argparse.Namespace(kind=module.ModelType.encoder, rank=3),
        "random": values,
        "scalar": values[2],
        "weight": torch.arange(6.0).view(2, 3),
    }
    with patch.dict(sys.modules, modules):
        torch.save(content, tmp_path / "state.pt")

    read = read_foreign(tmp_path / "state.pt")

    assert type(read["args"]).__name__ == "argparse.Namespace"
    assert read["args"].state["rank"] == 3
    assert read["args"].state["kind"].arguments[-1] in (1, "encoder")  # by the version of Python
    assert isinstance(read["random"], StandIn)
    assert torch.equal(read["weight"], content["weight"])
    assert module.__name__ not in sys.modules


@pytest.mark.parametrize("is_zip", [True, False])
def test_tensors_are_mapped_if_the_file_allows_it(tmp_path: Path, is_zip: bool) -> None:
    path = tmp_path / "state.pt"
    size = 1 << 20
    torch.save({"weight": torch.zeros(size)}, path, _use_new_zipfile_serialization=is_zip)
    read = read_foreign(path)["weight"]
    with open(path, "r+b") as file:
        end = file.read().rindex(bytes(4096))  # zeros of the tensor
        file.seek(end)
        file.write(b"\x01" * 4096)
    assert bool(read.any()) == is_zip


def test_a_compressed_file_is_read(tmp_path: Path) -> None:
    """torch maps the compressed bytes of such a file as if they were values."""
    path = tmp_path / "state.pt"
    values = torch.arange(1000.0)
    torch.save({"weight": values}, tmp_path / "plain")
    with zipfile.ZipFile(tmp_path / "plain") as plain, zipfile.ZipFile(path, "w") as archive:
        for name in plain.namelist():
            archive.writestr(name, plain.read(name), zipfile.ZIP_DEFLATED)
    assert torch.equal(read_foreign(path)["weight"], values)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 torn", b"\x80\x02garbage"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state.pt"
    path.write_bytes(content)
    with raises_problem("tensor-file-unreadable", contains=str(path)):
        read_foreign(path)
    with raises_problem("tensor-file-unreadable", contains=str(path)):
        read_dcp_metadata(path)


def test_contents_are_read_like_a_file() -> None:
    file = io.BytesIO()
    torch.save([{"iteration": 3}], file)
    assert read_foreign(file.getvalue(), "common") == [{"iteration": 3}]
