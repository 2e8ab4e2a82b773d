"""Rules of docs/development/architecture.md: who imports what, read without running the source."""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from tests.import_graph import (
    PACKAGE,
    REPOSITORY,
    folder_imports,
    imports,
    module_of,
    nodes,
    sources,
    tree,
)
from tests.tables import tables

TABLES = tables(__file__)

ALLOWED = TABLES["allowed"]
"""What each folder imports of the package, exactly."""

ONLY_IN = TABLES["only_in"]
"""The only folders and files that use some names."""

NEVER_IN = TABLES["never_in"]
"""Folders and files that do not use some names."""

DEVICES = {
    "cpu",
    "cuda",
    "hip",
    "hpu",
    "klxpu",
    "mlu",
    "mps",
    "mtia",
    "npu",
    "privateuseone",
    "rocm",
    "sdaa",
    "supa",
    "xpu",
}

ENTRY_POINTS = [*(REPOSITORY / "tools").rglob("*.py"), REPOSITORY / "pretrain_gpt.py"]
NO_NAMES = {"each", "found", "given", "kind", "number", "own", "place"}
"""Words that name no thing: see CONTRIBUTING.md."""
MUTATORS = (
    "add",
    "append",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "remove",
    "setdefault",
    "update",
)


def files(places: str) -> set[Path]:
    """The files of the package in some folders, or at some paths."""
    paths = [PACKAGE / place for place in places.split()]
    assert all(path.exists() for path in paths), f"moved: one of {places}"
    return {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}


@functools.cache
def used_names(path: Path) -> set[str]:
    """The imports of a file, and the attributes of modules: `torch.cuda.synchronize`."""
    imported = set(imports(path))
    modules = {name.split(".")[0] for name in imported}
    return imported | {name for name in attributes(path) if name.split(".")[0] in modules}


def attributes(path: Path) -> set[str]:
    """Dotted names: `torch.cuda.synchronize`."""
    return {name for node in nodes(path) if (name := dotted(node)) and "." in name}


def dotted(node: ast.AST) -> str:
    """The text of a name, or of attributes of a name; "" for other expressions."""
    if isinstance(node, ast.Attribute):
        value = dotted(node.value)
        return f"{value}.{node.attr}" if value else ""
    return node.id if isinstance(node, ast.Name) else ""


def users(names: str, paths: Iterable[Path]) -> list[str]:
    """Where files import or use one of the names, or a part of it."""
    prefixes = tuple(f"{name}." for name in names.split())
    return [
        f"{path.relative_to(REPOSITORY)} uses {used}"
        for path in paths
        for used in used_names(path)
        if f"{used}.".startswith(prefixes)
    ]


def test_folders_import_what_is_allowed_without_cycles() -> None:
    allowed = {folder: set(names.split()) for folder, names in ALLOWED.items()}
    assert folder_imports() == allowed
    TopologicalSorter(allowed).prepare()


def test_modules_have_no_import_cycle() -> None:
    modules = {module_of(path): path for path in sources()}
    # `from . import x` names the package itself, which imports nothing.
    graph = {
        module: modules.keys() & set(imports(path, at_runtime=True)) - {module}
        for module, path in modules.items()
    }
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(("names", "places"), ONLY_IN.items())
def test_names_are_used_only_in_their_places(names: str, places: str) -> None:
    assert users(names, set(sources()) - files(places)) == []


@pytest.mark.parametrize(("names", "places"), NEVER_IN.items())
def test_names_are_not_used_where_they_are_excluded(names: str, places: str) -> None:
    assert users(names, files(places)) == []


def test_entry_points_leave_command_lines_to_the_cli_package() -> None:
    assert users("argparse", ENTRY_POINTS) == []


def test_benchmarks_find_their_package_wherever_they_are_called() -> None:
    """It is not installed: the path of the repository comes before the first import of it."""
    for path in (REPOSITORY / "benchmarks").rglob("*.py"):
        text = path.read_text("utf-8")
        if '__name__ == "__main__"' in text and "\nfrom benchmarks." in text:
            assert "sys.path.insert(0" in text.partition("\nfrom benchmarks.")[0], path


def test_devices_are_named_in_two_files_only() -> None:
    """Accelerators of DeepSpeed and torch, also as attributes such as `is_cuda`; benchmarks, which
    measure on a CPU, may name that.

    Claim (accelerators): two files name devices, and no other file of the package, its tools and
    examples
    """

    def names(node: ast.AST) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value.split(":")[0]
        return node.attr.removeprefix("is_") if isinstance(node, ast.Attribute) else ""

    def literals(paths: Iterable[Path], kinds: set[str]) -> list[str]:
        return [
            f"{path}:{getattr(node, 'lineno', '?')} {ast.unparse(node)}"
            for path in paths
            for node in nodes(path)
            # `.cpu()` copies to the host from any device.
            if names(node) in kinds and not ast.unparse(node).endswith(".cpu")
        ]

    folders = [REPOSITORY / name for name in ("tasks", "examples")]
    paths = {*sources(), *ENTRY_POINTS, *(path for each in folders for path in each.rglob("*.py"))}
    assert literals(paths - files("config/devices.py launch/device.py"), DEVICES) == []
    assert literals((REPOSITORY / "benchmarks").rglob("*.py"), DEVICES - {"cpu"}) == []


def test_files_are_never_unpickled_into_code() -> None:
    """Tensors are read as tensors, in one place; nothing else is unpickled."""
    unsafe = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"}
    (call,) = [
        (path, ast.unparse(node))
        for path in [*sources(), *ENTRY_POINTS]
        for node in nodes(path)
        if isinstance(node, ast.Call)
        and (dotted(node.func) in unsafe or any(map(allows_pickle, node.keywords)))
    ]
    assert call[0] == PACKAGE / "engine" / "deepspeed" / "tensor_files.py"
    assert call[1].startswith("torch.load(")
    assert "weights_only=True" in call[1]
    (restricted,) = [
        (path, {item.name for item in node.body if isinstance(item, ast.FunctionDef)})
        for path in [*sources(), *ENTRY_POINTS]
        for node in nodes(path)
        if isinstance(node, ast.ClassDef) and "pickle.Unpickler" in map(ast.unparse, node.bases)
    ]
    assert restricted[0] == PACKAGE / "conversion" / "safe_unpickle.py"
    assert "find_class" in restricted[1]


def allows_pickle(keyword: ast.keyword) -> bool:
    return keyword.arg == "allow_pickle" and ast.unparse(keyword.value) == "True"


def definitions(*kinds: type[ast.AST]) -> dict[str, Any]:
    """Functions or classes of the package and of its entry points, by file, line and full name."""

    def search(node: ast.AST, path: Path, parents: str = "") -> Iterator[tuple[str, ast.AST]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            is_scope = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            name = f"{parents}{getattr(child, 'name', '')}"
            if isinstance(child, kinds):
                yield f"{path.relative_to(REPOSITORY)}:{getattr(child, 'lineno', 0)} {name}", child
            yield from search(child, path, f"{name}." if is_scope else parents)

    files = [*sources(), *ENTRY_POINTS]
    return {place: node for path in files for place, node in search(tree(path), path)}


def lines_of(node: ast.ClassDef | ast.FunctionDef) -> int:
    return (node.end_lineno or 0) - node.lineno + 1


def parameters_of(function: ast.FunctionDef) -> int:
    args = function.args
    named = len(args.posonlyargs) + len(args.args) + len(args.kwonlyargs)
    return named + bool(args.vararg) + bool(args.kwarg)


def above(limit: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """What is too large."""
    return {place: size for place, size in sizes.items() if size > limit}


def test_functions_that_are_kept_have_names() -> None:
    """No lambda is assigned, the default of a parameter, or an entry of a table."""
    kept = []
    for path in [*sources(), *ENTRY_POINTS]:
        for node in nodes(path):
            values: list[Any] = []
            if isinstance(node, ast.Assign | ast.AnnAssign):
                values = [node.value]
            elif isinstance(node, ast.arguments):
                values = [*node.defaults, *node.kw_defaults]
            elif isinstance(node, ast.Dict):
                values = node.values
            places = [value.lineno for value in values if isinstance(value, ast.Lambda)]
            kept += [f"{path.relative_to(REPOSITORY)}:{line}" for line in places]
    assert kept == []


def test_folders_have_few_modules() -> None:
    """A list of a folder is read at a glance; a full folder gets folders of its own."""
    modules = Counter(path.parent for path in sources() if path.name != "__init__.py")
    assert {folder.name: count for folder, count in modules.items() if count > 14} == {}


def test_functions_classes_and_modules_are_short() -> None:
    """Functions up to 60 lines, classes up to 300, modules up to 500: see CONTRIBUTING.md."""
    functions = definitions(ast.FunctionDef, ast.AsyncFunctionDef)
    classes = definitions(ast.ClassDef)
    modules = {
        str(path.relative_to(REPOSITORY)): len(path.read_text("utf-8").splitlines())
        for path in [*sources(), *ENTRY_POINTS]
    }
    assert len(modules) > 400
    assert len(functions) > 3600
    assert above(60, {place: lines_of(node) for place, node in functions.items()}) == {}
    assert above(300, {place: lines_of(node) for place, node in classes.items()}) == {}
    assert above(500, modules) == {}


def test_functions_have_few_parameters() -> None:
    """At most ten, `self` included."""
    functions = definitions(ast.FunctionDef, ast.AsyncFunctionDef)
    counts = {place: parameters_of(node) for place, node in functions.items()}
    assert above(10, counts) == {}


EVERYWHERE = [
    path
    for folder in ("megatron_ds", "tools", "tests", "benchmarks", "examples")
    for path in sorted((REPOSITORY / folder).rglob("*.py"))
]


def is_packed(node: ast.AST) -> bool:
    """Whether elements are grouped by `*(a, b)`, which means the same as `a, b`."""
    is_group = isinstance(node, ast.Starred) and isinstance(node.value, ast.Tuple | ast.List)
    return is_group and isinstance(node.ctx, ast.Load)


def assigned(target: ast.expr) -> Iterator[ast.expr]:
    """The names, attributes and elements of a target."""
    if isinstance(target, ast.Tuple | ast.List):
        for item in target.elts:
            yield from assigned(item)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def has_several_assignments(node: ast.AST) -> bool:
    """Whether a statement is `a = b = 1`, or `a, b = 1, 2`.

    Not if a value is unpacked, or if the assignments have to be simultaneous, as in a swap.
    """
    if not isinstance(node, ast.Assign):
        return False
    target, *further = node.targets
    value = node.value
    if further:
        return True
    if not (isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)):
        return False
    read = set[str]()
    for item, expression in reversed([*zip(target.elts, value.elts, strict=False)]):
        if read.intersection(map(ast.unparse, assigned(item))):
            return False
        read.update(ast.unparse(part) for part in ast.walk(expression))
    return True


@pytest.mark.parametrize(
    ("statement", "is_refused"),
    [
        ("f(*(a, b))", True),
        ("NAMES = (*['a', 'b'], *('c', 'd'))", True),
        ("f(*a, *((b, c) if d else ()))", False),
        ("first, *(a, b) = c", False),
        ("a = b = 0", True),
        ("a, b = 1, 2", True),
        ("a, b = f(), b + 1", True),
        ("self.a, b = c, self.d", True),
        ("a, b = c", False),
        ("a, b = b, a", False),
        ("a, b = b, a + b", False),
        ("self.a, b = c, self.a.d", False),
        ("a[i], a[j] = a[j], a[i]", False),
    ],
)
def test_packed_arguments_and_several_assignments_are_recognized(
    statement: str, is_refused: bool
) -> None:
    parts = list(ast.walk(ast.parse(statement)))
    assert any(is_packed(node) or has_several_assignments(node) for node in parts) is is_refused


@pytest.mark.parametrize("is_refused", [is_packed, has_several_assignments])
def test_arguments_are_not_packed_and_a_statement_assigns_once(
    is_refused: Callable[[ast.AST], bool],
) -> None:
    """Arguments are not grouped to save lines, and each assignment has a line."""
    offenders = [
        f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', '?')} {ast.unparse(node)}"
        for path in EVERYWHERE
        for node in nodes(path)
        if is_refused(node)
    ]
    assert offenders == []


def bindings(path: Path) -> Iterator[tuple[str, ast.AST]]:
    """The names of variables and parameters; fields of classes are none of them."""
    classes = [node for node in nodes(path) if isinstance(node, ast.ClassDef)]
    fields = [
        item.target for node in classes for item in node.body if isinstance(item, ast.AnnAssign)
    ]
    for node in nodes(path):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.id, node
        elif isinstance(node, ast.arg):
            yield node.arg, node
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.name or "", node


def test_variables_and_parameters_are_named_by_things() -> None:
    offenders = [
        f"{path.relative_to(REPOSITORY)}:{getattr(node, 'lineno', '?')} {name}"
        for path in [*sources(), *ENTRY_POINTS, *(REPOSITORY / "tasks").rglob("*.py")]
        for name, node in bindings(path)
        if name in NO_NAMES
    ]
    assert offenders == []


def test_modules_keep_no_state() -> None:
    """No `global`; no module-level container that a function of the module changes."""
    offenders = []
    for path in sources():
        containers = {
            target.id
            for statement in tree(path).body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in getattr(statement, "targets", None) or [statement.target]
            if isinstance(target, ast.Name)
        }
        if not any(
            isinstance(node, ast.Global) or changes(node, containers) for node in nodes(path)
        ):
            continue
        for function in nodes(path):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                shared = containers - local_names(function)
                offenders += [
                    f"{path}:{getattr(node, 'lineno', '?')} {ast.unparse(node)}"
                    for node in ast.walk(function)
                    if isinstance(node, ast.Global) or changes(node, shared)
                ]
    assert offenders == []


def local_names(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that a function binds itself, including its arguments."""
    return {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)} | {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def changes(node: ast.AST, containers: set[str]) -> bool:
    """Whether a node changes one of the containers."""
    if isinstance(node, ast.Subscript):
        is_read = isinstance(node.ctx, ast.Load)
        return not is_read and ast.unparse(node.value) in containers
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in MUTATORS and ast.unparse(node.func.value) in containers
    return False
