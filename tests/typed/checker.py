"""Follows the types of all tensors through a forward and a backward pass.

A dispatch mode sees every operator of torch and every collective that a pass consists of, also
those of backward passes, whether autograd or the package has written them. It reads no values. The
process is one rank of torch's fake process group, whose collectives return at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from spmd_types import P, R, V
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ds.parallel.mesh import Mesh
from tests.typed.lattice import (
    NAMES,
    NO_DIM,
    OWN,
    REPLICATED,
    ZERO,
    MismatchError,
    Type,
    merged,
    varying,
)
from tests.typed.rules import Call, result_types

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = Path(__file__).parent
RECEIVED = 0.01
"""Value of all numbers that a rank receives."""
SIZES = ("pp", "edp", "ep", "cp", "ulysses", "tp")
"""The axes of the mesh, the fastest one last: "edp" are the ranks with the same experts and other
samples."""
DATA = ("edp", "ep")
"""Axes whose ranks have other samples."""
SUMS = ("sums", P)
PARTS = ("exchanges parts of", V)
SENT = {
    **dict.fromkeys(("allreduce", "reduce_scatter", "reduce_scatter_base"), SUMS),
    **dict.fromkeys(("allgather", "allgather_base", "alltoall_base"), PARTS),
}
"""By collective, what it does with tensors and how these lie."""
Types = dict[str, Type]
Key = tuple[int, int, torch.Size, tuple[int, ...]]


class TypesError(Exception):
    """A tensor does not lie on the ranks as it must; the message begins with file and line."""


class Axes:
    """The axes of a mesh that have several ranks, and which of them a process group spans."""

    def __init__(self, mesh: Mesh, expert_dp: int) -> None:
        self.mesh = mesh
        sizes = {axis: getattr(mesh, axis).size for axis in SIZES if axis != "edp"}
        self.sizes = {axis: sizes.get(axis, expert_dp) for axis in SIZES}
        self.names = [name for name, size in self.sizes.items() if size > 1]

    def spanned(self, ranks: Iterable[int]) -> list[str]:
        coordinates: dict[str, set[int]] = {name: set() for name in self.sizes}
        for rank in ranks:
            for name, size in reversed(self.sizes.items()):
                rank, at = divmod(rank, size)
                coordinates[name].add(at)
        return [name for name, at in coordinates.items() if len(at) > 1]


class Checker(TorchDispatchMode):
    """Types every tensor on every axis.

    Args:
        axes: The axes.
    """

    def __init__(self, axes: Axes) -> None:
        super().__init__()
        self.axes = axes
        self.local = 0
        """Depth of functions that compute with parts of sharded dimensions."""
        self.means = 0
        """Depth of functions that compute a mean over ranks, whatever they have."""
        self.opaque = 0
        """Depth of functions whose types on the axis of context parallelism are only declared."""
        self.parameters: dict[int, str] = {}
        """Names by identity."""
        self.used: dict[int, str] = {}
        """File and line of the first use of each parameter."""
        self._types: dict[Key, Types] = {}
        self._of_storage: dict[int, list[Key]] = {}
        self._kept: list[Any] = []
        """Storages, so that no address is used twice."""

    # Types of tensors.

    def types(self, tensor: Tensor) -> Types:
        key = _key(tensor)
        if key in self._types:
            return self._types[key]
        if others := self._of_storage.get(key[0]):
            return {axis: Type(each.kind) for axis, each in self._types[others[0]].items()}
        return {}

    def type_of(self, tensor: Tensor, axis: str) -> Type:
        return self.types(tensor).get(axis, REPLICATED)

    def set(self, tensor: Tensor, types: Mapping[str, Type]) -> None:
        key = _key(tensor)
        if key not in self._types:
            if key[0] not in self._of_storage:
                self._kept.append(tensor.untyped_storage())
            self._of_storage.setdefault(key[0], []).append(key)
        self._types[key] = dict(types)

    def _write(self, tensor: Tensor, types: Types) -> None:
        """Set the types of a tensor that is written to, and of its other views."""
        self.set(tensor, types)
        key = _key(tensor)
        is_whole = tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        for other in self._of_storage[key[0]]:
            if other == key:
                continue
            before = self._types[other]
            for axis in self.axes.names:
                written = types.get(axis, REPLICATED)
                if len(other[2]) != tensor.dim():
                    written = Type(written.kind)
                old = before.get(axis, REPLICATED)
                before[axis] = written if is_whole else merged(old, written)

    # Operators.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        namespace, _, name = func._schema.name.partition("::")
        inputs = _tensors((args, kwargs))
        before = {id(tensor): self.types(tensor) for tensor in inputs}
        for tensor in inputs:
            if id(tensor) in self.parameters and id(tensor) not in self.used:
                self.used[id(tensor)] = where()
        result = func(*args, **kwargs)
        if namespace in ("c10d", "_c10d_functional"):
            self._communicate(name, func, args)
        elif outputs := _tensors(result):
            try:
                self._infer(func, name, _arguments(func, args, kwargs), before, outputs)
            except MismatchError as error:
                raise self.error(f"{error}, in {name}") from None
        return result

    def _infer(
        self,
        func: Any,
        name: str,
        values: list[Any],
        before: Mapping[int, Types],
        outputs: list[Tensor],
    ) -> None:
        """Type the outputs of an operator.

        Args:
            func: The operator.
            name: Its name.
            values: Its arguments.
            before: Types of its inputs before the call, by identity.
            outputs: What it has returned.
        """
        schema = func._schema.arguments
        arguments = list(zip(values, schema, strict=True))
        written = _tensors([v for v, a in arguments if a.alias_info and a.alias_info.is_write])
        if any(argument.is_out for argument in schema):
            values = [value for value, argument in arguments if not argument.is_out]
        elif written:
            name = name.rstrip("_")
        results: list[Types] = [{} for _ in outputs]
        for axis in self.axes.names:
            if self.opaque and axis == "cp":
                for types in results:
                    types[axis] = ZERO
                continue

            def type_of(tensor: Tensor, axis: str = axis) -> Type:
                return (before.get(id(tensor)) or self.types(tensor)).get(axis, REPLICATED)

            is_data = axis in DATA
            is_local = self.local > 0
            call = Call(name, tuple(values), _tensors(values), outputs, type_of, is_data, is_local)
            try:
                inferred = result_types(call)
            except MismatchError as error:
                raise MismatchError(f"{error}, on the {axis} axis") from None
            for types, type_ in zip(results, inferred, strict=True):
                types[axis] = type_
        for output, types in zip(outputs, results, strict=True):
            is_written = any(output is tensor for tensor in written)
            (self._write if is_written else self.set)(output, types)

    def _communicate(self, name: str, func: Any, args: tuple[Any, ...]) -> None:
        """Type what a collective writes, and fill it."""
        groups = [value for value in args if isinstance(value, torch.ScriptObject)]
        tensors = [found for value in args[:2] if (found := _tensors(value))]
        if not groups or not tensors:
            return
        handles = [dist.ProcessGroup.unbox(each) for each in groups[:1]]
        axes = self.axes.spanned(dist.get_process_group_ranks(handles[0]))
        axes = [axis for axis in axes if axis in self.axes.names]
        received = tensors[0]
        sent = tensors[-1]
        operation = name.strip("_")
        for axis in axes:
            for tensor in sent:
                self._check_sent(operation, tensor, axis)
        source = self.types(sent[0])
        for tensor in received:
            after = dict(source)
            for axis in axes:
                after[axis] = _received(operation, source.get(axis, REPLICATED))
            if operation != "allreduce":
                with torch.no_grad():
                    self._fill(tensor, sent[0])
            self._write(tensor, after)

    def _check_sent(self, operation: str, tensor: Tensor, axis: str) -> None:
        kind = self.type_of(tensor, axis).kind
        if not tensor.is_floating_point() or kind is None or operation not in SENT or self.means:
            return
        what, wanted = SENT[operation]
        if kind is not wanted and not (wanted is P and kind is V and self.local):
            text = f"{operation} {what} a tensor that is {NAMES[kind]} on the {axis} axis"
            raise self.error(f"{text}, not {NAMES[wanted]}")

    def _fill(self, tensor: Tensor, sent: Tensor) -> None:
        if tensor.is_floating_point():
            tensor.fill_(RECEIVED)
        elif tensor.numel() == sent.numel():
            tensor.copy_(sent.view(tensor.shape))
        else:
            tensor.zero_()

    # Checks of what is declared.

    def conform(self, tensor: Tensor, axis: str, declared: Type, what: str, line: str = "") -> None:
        """Check the type of a tensor against a declaration, and use what it says in addition.

        What is replicated may be taken for varying, e.g. where each rank takes its slice of it.

        Raises:
            TypesError: It does not lie as declared.
        """
        actual = self.type_of(tensor, axis)
        if declared is OWN:
            self.set(tensor, self.types(tensor) | {axis: varying()})
            return
        if declared == varying(NO_DIM) and actual.kind in (R, V):
            self.set(tensor, self.types(tensor) | {axis: varying()})
            return
        if declared.dim is not None and declared.dim < 0:
            declared = varying(declared.dim + tensor.dim())
        if actual.kind is None or (
            actual.kind is declared.kind and actual.dim in (None, declared.dim)
        ):
            is_right = True
        else:
            is_right = declared.kind is V and actual == REPLICATED
            is_right = is_right or (actual.kind is V and declared == varying())
        if not is_right:
            text = f"{what} is {actual} on the {axis} axis; it is declared {declared}"
            raise TypesError(f"{line}: {text}, at {where()}") if line else self.error(text)
        if declared.kind is V and (declared.dim is None or actual.dim == declared.dim):
            return
        self.set(tensor, self.types(tensor) | {axis: declared})

    def error(self, text: str) -> TypesError:
        return TypesError(f"{where()}: {text}")


def _arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of an operator in their order, with the defaults of those not passed."""
    values = [
        kwargs.get(argument.name, argument.default_value) for argument in func._schema.arguments
    ]
    values[: len(args)] = args
    return values


def _received(operation: str, sent: Type) -> Type:
    if sent.kind is None:
        return ZERO
    if operation in ("allreduce", "allgather", "allgather_base", "broadcast"):
        return REPLICATED
    if operation in ("reduce_scatter_base", "reduce_scatter"):
        return varying(0)
    return varying()


def _key(tensor: Tensor) -> Key:
    return (
        tensor.untyped_storage()._cdata,
        tensor.storage_offset(),
        tensor.shape,
        tensor.stride(),
    )


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in _tensors(item)]


def _is_shown(file: str) -> bool:
    path = Path(file)
    is_ours = REPOSITORY in path.parents and "site-packages" not in path.parts
    return is_ours and path.parent != OURS


def where() -> str:
    """File and line of the package that called the operator; in a backward pass that autograd has
    written, of the forward pass's call."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_shown(file):
            return f"{_short(file)}:{frame.f_lineno}"
        if frame.f_code.co_name == "_engine_run_backward":
            break
        frame = frame.f_back  # type: ignore[assignment]
    node = torch._C._current_autograd_node()
    lines: Sequence[str] = () if node is None else node.metadata.get("traceback_", ())
    for text in reversed(lines):
        match = re.search(r'File "(.*)", line (\d+)', text)
        if match and _is_shown(match[1]):
            return f"{_short(match[1])}:{match[2]}"
    return "backward pass"


def _short(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(REPOSITORY)) if REPOSITORY in path.parents else file
