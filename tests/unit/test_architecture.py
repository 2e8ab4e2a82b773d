"""The floors of the house and who may import what, read from the source; nothing is run for it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.import_graph import PACKAGE, REPOSITORY, imports, module_of, sources, tree

LAYERS = {
    "config": 0,
    "fileio": 1,
    "launch": 1,
    "parallel": 1,
    "tokenizer": 1,
    "train_state": 1,
    "data": 2,
    "model": 2,
    "schedules": 2,
    "engine": 3,
    "preprocess": 3,
    "schedule_validation": 3,
    "checkpoint": 4,
    "cli": 4,
    "cleaning": 5,
    "inference": 5,
    "training": 5,
}
"""Layer of each folder and of each file at the top of the package. Imports go to a lower layer."""

ALLOWED = {
    "config": "",
    "fileio": "config",
    "train_state": "config",
    "launch": "config",
    "parallel": "config",
    "schedule_validation": "config schedules",
    "schedules": "config train_state",
    "tokenizer": "config",
    "cli": "config launch schedule_validation",
    "data": "config fileio tokenizer",
    "model": "config parallel",
    "engine": "config data fileio launch model parallel train_state",
    "preprocess": "config data fileio tokenizer",
    "checkpoint": "config data engine fileio launch parallel train_state",
    "cleaning": "cli config fileio launch preprocess tokenizer",
    "inference": "checkpoint cli config launch model parallel tokenizer",
    "training": "checkpoint config data engine fileio launch model parallel "
    "schedule_validation schedules tokenizer train_state",
}
"""What each folder imports of the package, exactly."""

DEEPSPEED = ("engine/", "checkpoint/", "launch/")
ENVIRONMENT = ("launch/",)
HTTP = ("inference/server.py",)
DEVICE = ("launch/device.py",)
WITHOUT_TORCH = (
    "checkpoint/metadata.py",
    "checkpoint/selection.py",
    "config/",
    "fileio/",
    "train_state.py",
    "schedule_validation.py",
    "schedules.py",
    "launch/extension_locks.py",
    "data/blend_schedule.py",
    "data/blend_spec.py",
    "data/build_datasets.py",
    "data/index_cache.py",
    "data/indexed_dataset.py",
    "data/merge.py",
    "data/sample_index.py",
    "data/token_file_stats.py",
    "data/tokenizer_metadata.py",
    "data/validation.py",
    "preprocess/",
)
WITHOUT_GROUPS = ("data/", "preprocess/", "tokenizer/", "cleaning/", "fileio/")


def name_of(path: Path) -> str:
    """Path below the package: `data/indexed.py`."""
    return path.relative_to(PACKAGE).as_posix()


def uses(path: Path, package: str) -> bool:
    return any(name == package or name.startswith(package + ".") for name in imports(path))


def allowed(path: Path, places: tuple[str, ...]) -> bool:
    """Whether a file is one of the places, or lies in one that ends with a slash."""
    return any(
        name_of(path) == place or (place.endswith("/") and name_of(path).startswith(place))
        for place in places
    )


def room(module: str) -> str:
    """`megatron_ds.data.indexed_dataset` lies in `data`."""
    return module.split(".")[1]


def report(offenders: list[str]) -> None:
    assert not offenders, "\n" + "\n".join(offenders)


def test_every_folder_has_a_layer() -> None:
    folders = {room(module_of(path)) for path in sources() if path.parent != PACKAGE}
    files = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}

    assert folders | files == set(LAYERS) == set(ALLOWED)


def test_imports_go_to_a_lower_layer() -> None:
    report(
        [
            f"{folder} (layer {LAYERS[folder]}) may not import {name} (layer {LAYERS[name]})"
            for folder, names in ALLOWED.items()
            for name in names.split()
            if LAYERS[name] >= LAYERS[folder]
        ]
    )


@pytest.mark.parametrize("folder", ALLOWED)
def test_a_folder_imports_what_is_allowed(folder: str) -> None:
    found: dict[str, str] = {}
    for path in sources():
        if path != PACKAGE / "__init__.py" and room(module_of(path)) == folder:
            for name in imports(path):
                if name.startswith("megatron_ds.") and room(name) != folder:
                    found.setdefault(room(name), f"{name_of(path)} imports {name}")

    report([line for name, line in found.items() if name not in ALLOWED[folder].split()])
    assert set(found) == set(ALLOWED[folder].split()), "remove what is no longer imported"


def test_the_entry_files_are_imported_by_nobody() -> None:
    report(
        [
            f"{name_of(path)} imports {entry}"
            for path in sources()
            for entry in ("pretrain_gpt", "tools", "benchmarks", "tests")
            if uses(path, entry)
        ]
    )


def test_there_is_no_import_circle() -> None:
    modules = {module_of(path): path for path in sources()}
    graph = {
        module: sorted({name for name in imports(path, at_runtime=True) if name in modules})
        for module, path in modules.items()
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join([*trail, module])
        if module not in done:
            for target in graph[module]:
                # `from . import x` names the package itself, which imports nothing.
                if target != module:
                    visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize(
    ("package", "places"),
    [("deepspeed", DEEPSPEED), ("fastapi", HTTP), ("starlette", HTTP), ("uvicorn", HTTP)],
    ids=["deepspeed", "fastapi", "starlette", "uvicorn"],
)
def test_a_package_is_imported_in_its_places_alone(package: str, places: tuple[str, ...]) -> None:
    report(
        [
            f"{name_of(path)} imports {package}"
            for path in sources()
            if uses(path, package) and not allowed(path, places)
        ]
    )


def test_command_lines_are_read_by_cli_alone() -> None:
    paths = [*sources(), *(REPOSITORY / "tools").rglob("*.py"), REPOSITORY / "pretrain_gpt.py"]
    report([f"{path} imports argparse" for path in paths if uses(path, "argparse")])


def test_environment_variables_are_the_runtimes() -> None:
    names = {"environ", "environb", "getenv", "putenv", "unsetenv"}
    report(
        [
            f"{name_of(path)}:{node.lineno} uses os.{node.attr}"
            for path in sources()
            if not allowed(path, ENVIRONMENT)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute)
            and node.attr in names
            and ast.unparse(node.value) == "os"
        ]
        + [
            f"{name_of(path)} imports {name}"
            for path in sources()
            if not allowed(path, ENVIRONMENT)
            for name in imports(path)
            if name.removeprefix("os.") in names
        ]
    )


def test_the_ground_and_the_index_arithmetic_know_no_torch() -> None:
    for place in WITHOUT_TORCH:
        assert (PACKAGE / place).exists(), f"{place} has moved: correct this list"
    report(
        [
            f"{name_of(path)} imports torch"
            for path in sources()
            if allowed(path, WITHOUT_TORCH) and uses(path, "torch")
        ]
    )


def test_data_and_tokenizer_know_no_process_groups() -> None:
    report(
        [
            f"{name_of(path)} imports {package}"
            for path in sources()
            if allowed(path, WITHOUT_GROUPS)
            for package in ("torch.distributed", "deepspeed", "megatron_ds.parallel")
            if uses(path, package)
        ]
        + [
            f"{name_of(path)}:{node.lineno} uses {ast.unparse(node)}"
            for path in sources()
            if allowed(path, WITHOUT_GROUPS)
            for node in ast.walk(tree(path))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
    )


def test_no_kind_of_device_is_named_outside_the_runtime() -> None:
    def names_it(node: ast.AST) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, str) and (
                node.value == "cuda" or node.value.startswith("cuda:")
            )
        return isinstance(node, ast.Attribute) and (
            node.attr == "cuda" or ast.unparse(node).startswith("torch.cuda")
        )

    report(
        [
            f"{name_of(path)}:{getattr(node, 'lineno', '?')} {ast.unparse(node)}"
            for path in sources()
            if not allowed(path, DEVICE)
            for node in ast.walk(tree(path))
            if names_it(node)
        ]
    )


def test_what_is_read_can_run_no_code() -> None:
    """Tensors are read as tensors, in one place; nothing else is unpickled."""
    unsafe = {"pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load"}
    calls = [
        (path, ast.unparse(node))
        for path in [*sources(), *(REPOSITORY / "tools").rglob("*.py")]
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and (ast.unparse(node.func) in unsafe or "allow_pickle=True" in ast.unparse(node))
    ]
    assert [path for path, _ in calls] == [PACKAGE / "engine" / "ds_checkpoint_io.py"]
    assert calls[0][1].startswith("torch.load(")
    assert "weights_only=True" in calls[0][1]


def test_no_module_keeps_state() -> None:
    """No `global`; no module-level container that a function of the module changes."""
    offenders = []
    for path in sources():
        module = tree(path)
        containers = {
            target.id
            for statement in module.body
            if isinstance(statement, ast.Assign | ast.AnnAssign)
            for target in (
                statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            )
            if isinstance(target, ast.Name)
        }
        for function in ast.walk(module):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                local = assigned(function)
                offenders += [
                    f"{name_of(path)}:{line} {what}"
                    for line, what in changes(function, containers - local)
                ]
    report(offenders)


def assigned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names that a function binds itself, its arguments too."""
    names = {argument.arg for argument in ast.walk(function.args) if isinstance(argument, ast.arg)}
    return names | {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


MUTATORS = {
    "add", "append", "clear", "discard", "extend", "insert", "pop", "popitem", "remove",
    "setdefault", "update",
}  # fmt: skip


def changes(
    function: ast.FunctionDef | ast.AsyncFunctionDef, containers: set[str]
) -> Iterator[tuple[int, str]]:
    """Lines of a function that change one of the containers, and what stands there."""

    def is_change(node: ast.AST) -> bool:
        if isinstance(node, ast.Subscript):
            return (
                isinstance(node.ctx, ast.Store | ast.Del) and ast.unparse(node.value) in containers
            )
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            return node.func.attr in MUTATORS and ast.unparse(node.func.value) in containers
        return isinstance(node, ast.Global)

    for node in ast.walk(function):
        if is_change(node):
            yield getattr(node, "lineno", 0), ast.unparse(node)


def test_the_ground_loads_no_torch() -> None:
    code = (
        "import sys, megatron_ds.config, megatron_ds.train_state, megatron_ds.schedules, "
        "megatron_ds.cli.arguments, megatron_ds.launch.extension_locks; "
        "print([name for name in ('torch', 'deepspeed', 'transformers') if name in sys.modules])"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )

    assert result.stdout.strip() == "[]"


NOTHING_BUILT_OR_FETCHED = """
import socket, subprocess, sys
import torch, deepspeed  # their own start is not ours to judge

def refuse(self=None, *arguments, **keywords):
    raise SystemExit(f"an import started or fetched something: {arguments}")

subprocess.Popen.__init__ = refuse
socket.socket.connect = refuse
import torch.utils.cpp_extension
torch.utils.cpp_extension.load = torch.utils.cpp_extension.load_inline = refuse
import importlib
for module in sys.argv[1:]:
    importlib.import_module(module)
print("imported", len(sys.argv) - 1)
"""


WITHOUT_DEEPSPEED = """
import sys
sys.modules["deepspeed"] = None  # importing it raises ImportError
import megatron_ds.inference.generate, megatron_ds.model.gpt
print("imported")
"""


def test_model_is_imported_without_deepspeed() -> None:
    command = [sys.executable, "-c", WITHOUT_DEEPSPEED]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.stdout == "imported\n", result.stderr


def test_importing_builds_and_fetches_nothing() -> None:
    modules = [module_of(path) for path in sources()]

    result = subprocess.run(
        [sys.executable, "-c", NOTHING_BUILT_OR_FETCHED, *modules],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
    )

    assert result.stdout.splitlines()[-1:] == [f"imported {len(modules)}"], result.stderr[-2000:]
