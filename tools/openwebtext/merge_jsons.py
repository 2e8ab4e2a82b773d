"""The name that Megatron gives to merge_data.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.openwebtext.merge_data import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
