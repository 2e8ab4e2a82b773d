#!/usr/bin/env python
"""Evaluate a trained GPT as `tools/evaluate.py`, under the name that it has in Megatron-LM.

Runs with python, or as several processes (torchrun, deepspeed), which share the texts, or the model
with --tensor-model-parallel-size.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.realpath(f"{os.path.realpath(__file__)}/../.."))
    from megatron_ds.launch import program_start

    program_start.begin()

from megatron_ds.evaluation.command import run
from megatron_ds.evaluation.options import Options
from megatron_ds.inference.cli import run_program

if __name__ == "__main__":
    run_program(Options, run, sys.argv[1:])
