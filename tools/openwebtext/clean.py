"""Clean documents: fix Unicode, filter, drop duplicates, remove texts of evaluation tasks.

The command line of `megatron_ds.cleaning`.
"""

from __future__ import annotations

if __name__ == "__main__":
    import start_tool

from dataclasses import dataclass

from megatron_ds import cli
from megatron_ds.cleaning.command import CleaningCommand, work


@dataclass(frozen=True)
class Options(CleaningCommand):
    """Cleans documents: fixes Unicode, filters, drops duplicates, removes texts of evaluation
    tasks.

    The output does not depend on --workers.
    """


main = cli.program(Options, work)

if __name__ == "__main__":
    start_tool.run(main)
