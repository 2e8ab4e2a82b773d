"""The first lines of every program: checks Python and its packages, and handles an early Ctrl-C.

Called before the imports that take seconds, or that fail without the environment. Works with Python
3.8 or newer and without any package.
"""

import gc
import importlib.util
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

OLDEST_PYTHON = (3, 11)
PACKAGES = ("numpy", "rich", "safetensors", "tokenizers", "torch", "xxhash", "yaml")
"""Packages of the environment that every program finds there."""
SIZES = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
"""Variables of launchers with the number of processes."""


def begin() -> None:
    """Ends the program with a message if it cannot run; until `finish`, also at Ctrl-C.

    Raises:
        SystemExit: If Python is too old or packages are missing, with status 1.
    """
    problem = find_problem()
    if problem:
        raise SystemExit(f"{os.path.basename(sys.argv[0])}: error: {problem}")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)
        gc.disable()  # imports leave little to collect


def finish() -> None:
    """Restores KeyboardInterrupt for Ctrl-C, which the program handles from then on."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        gc.freeze()  # the modules stay
        gc.enable()


@contextmanager
def importing() -> "Iterator[None]":
    """Imports libraries without garbage collection, which would find little; the modules stay."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


def find_problem() -> str:
    """Returns the reason that this Python cannot run the programs; empty if it can."""
    if sys.version_info < OLDEST_PYTHON:
        version, needed = (".".join(map(str, v[:2])) for v in (sys.version_info, OLDEST_PYTHON))
        return f"needs Python {needed} or newer; {sys.executable} is Python {version}. {_remedy()}"
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return f"{sys.executable}{_host()} lacks the packages {', '.join(missing)}. {_remedy()}"
    return ""


def _host() -> str:
    """The host of one of several processes."""
    if all(os.environ.get(name, "1") == "1" for name in SIZES):
        return ""
    import socket

    return f" on {socket.gethostname()}"


def _remedy() -> str:
    root = os.path.abspath(os.path.join(os.path.dirname(__file__), *[os.pardir] * 3))
    if not os.path.exists(os.path.join(root, "setup.py")):  # an installed package
        return f"Install the package again: {sys.executable} -m pip install megatron_ds"
    python = os.path.join(root, ".venv", "bin", "python")
    if os.path.exists(python):
        return f"Run it with {python}"
    return f"Run `make install` in {root}, then the program with {python}"


def _exit(signum: int, frame: object) -> None:
    # An exception would be raised in the middle of an import, and end in a traceback.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        os.write(2, f"{os.path.basename(sys.argv[0])}: interrupted\n".encode())
    os._exit(128 + signum)
