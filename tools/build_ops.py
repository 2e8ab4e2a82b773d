"""Build DeepSpeed's C++ ops before the first run, and remove stale locks of killed builds."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.planning.build_ops import main

if __name__ == "__main__":
    start_tool.run(main)
