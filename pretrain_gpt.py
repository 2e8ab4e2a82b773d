#!/usr/bin/env python
"""Pretrains a GPT: reads the settings, checks them, builds the run and trains."""

from __future__ import annotations

if __name__ == "__main__":
    from megatron_ds.launch.process import program_start

    program_start.begin()

from megatron_ds.extend import Extensions, pretrain


def main() -> None:
    pretrain(Extensions())


if __name__ == "__main__":
    main()
