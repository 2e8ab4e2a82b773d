#!/usr/bin/env python
"""Runs pretrain_gpt.py with a meter around its steps.

    measured_run.py REPORT WARM_UP TIMED TRACE [flags of pretrain_gpt.py]

Writes the meter's figures to REPORT. TRACE is a file for the profile of a step, or "-".
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


def main() -> None:
    report, warm_up, timed, trace, *flags = sys.argv[1:]
    sys.argv = ["pretrain_gpt.py", *flags]
    import pretrain_gpt
    from benchmarks.accelerator.meter import Meter
    from benchmarks.common import write_json
    from megatron_ds.launch import environment

    environment.prepare_environment()
    from deepspeed.accelerator import get_accelerator

    from megatron_ds.training.trainer import Trainer

    meters: list[Meter] = []
    take_step = Trainer._step
    train = Trainer.run

    def step(self: Trainer, *arguments: Any) -> None:
        if not meters:
            import torch

            device = torch.device(get_accelerator().current_device_name())
            path = None if trace == "-" else Path(trace)
            meters.append(Meter(device, int(warm_up), int(timed), path))
        meters[0].step(lambda: take_step(self, *arguments))

    def run(self: Trainer) -> Any:
        code = train(self)
        if os.environ.get("RANK", "0") == "0":
            write_json(Path(report), meters[0].report())
        return code

    for name, function in (("_step", step), ("run", run)):
        setattr(Trainer, name, function)
    pretrain_gpt.main()


if __name__ == "__main__":
    main()
