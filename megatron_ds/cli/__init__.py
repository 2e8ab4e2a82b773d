"""Command lines: flags from dataclasses of options, for pretrain_gpt.py and all tools."""

from megatron_ds.cli.command import fail, parse, program, run

__all__ = ["fail", "parse", "program", "run"]
