"""Write a page with the charts and figures of runs."""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from megatron_ds.reports.report import main

if __name__ == "__main__":
    start_tool.run(main)
