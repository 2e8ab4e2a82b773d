"""Evaluate a trained GPT: perplexity of texts, WikiText-103 and LAMBADA.

Runs with python, or as several processes (torchrun, deepspeed), which share the texts, or the model
with --tensor-model-parallel-size.
"""

from __future__ import annotations

from functools import partial

from megatron_ds.evaluation.command import run
from megatron_ds.evaluation.options import Options
from megatron_ds.inference.cli import run_program

main = partial(run_program, Options, run)
