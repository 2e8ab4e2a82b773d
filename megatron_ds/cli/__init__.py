"""Command lines: flags from dataclasses of options, for pretrain_gpt.py and all tools."""

from megatron_ds.cli.command import fail, parse, run

__all__ = ["fail", "parse", "run"]
