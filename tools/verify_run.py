"""Check a run: replay recorded steps as one process on a CPU, and compare them with its records."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_ds import cli
from megatron_ds.training.verification import Options, verify

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
PRETRAIN = Path(__file__).resolve().parent.parent / "pretrain_gpt.py"


def work(options: Options) -> int:
    def replay(words: Sequence[str]) -> int:
        program = [sys.executable, options.script or str(PRETRAIN), *words]
        unset = [word for name in LAUNCHER for word in ("-u", name)]
        return subprocess.call(["env", *unset, "DS_ACCELERATOR=cpu", *program], stdout=sys.stderr)

    return verify(options, replay, print)


main = cli.program(Options, work)

if __name__ == "__main__":
    start_tool.run(main)
