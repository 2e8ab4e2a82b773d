"""Write the fp32 weights of a checkpoint: python zero_to_fp32.py CHECKPOINT_DIR OUTPUT_DIR.

A save copies this script to the folder of its checkpoints. It runs tools/zero_to_fp32.py of the
installed megatron_ds, because DeepSpeed's script of this name reads some layouts only.
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

MISSING = (
    "zero_to_fp32.py needs tools/zero_to_fp32.py of the repository of megatron_ds, which has saved "
    "these checkpoints. Run that file with the same arguments, or make the repository importable: "
    "pip install --editable REPOSITORY"
)


def main() -> None:
    spec = find_spec("megatron_ds")
    package = None if spec is None else next(iter(spec.submodule_search_locations or ()), None)
    tool = Path(package or "").parent / "tools" / "zero_to_fp32.py"
    if package is None or not tool.is_file():
        sys.exit(MISSING)
    runpy.run_path(str(tool), run_name="__main__")


if __name__ == "__main__":
    main()
