"""Runs a program of the package on the fake accelerator, and writes what the device has noted.

FAKE_ACCELERATOR is a JSON object: the library of the device, a file for the report, and the path of
the program; without one it is a training, which may have a `mistake`. The device may be a
plain one, see `accelerator.install`, and DeepSpeed may be missing.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    job = json.loads(os.environ["FAKE_ACCELERATOR"])
    from tests.fake_accelerator import accelerator, device  # imports torch

    accelerator.install(Path(job["library"]), is_plain=job.get("is_plain", False))
    if job.get("without_deepspeed"):
        sys.modules["deepspeed"] = None  # type: ignore[assignment]
    try:
        if job.get("program"):
            sys.path.insert(0, str(Path(job["program"]).resolve().parent))  # as Python does
            runpy.run_path(job["program"], run_name="__main__")
        else:
            train(job.get("mistake"))
    finally:
        import torch

        rank = os.environ.get("RANK", "0")
        report = {"reads": device.READS.noted, "counts": torch.ops.fakedev.take_counters()}
        Path(f"{job['report']}.{rank}").write_text(json.dumps(report))


def train(mistake: str | None) -> None:
    from megatron_ds.extend import Callback, Extensions, StepResult, TrainState, pretrain
    from tests.fake_accelerator.device import READS

    class Periods(Callback):
        """Names the periods in which values are read: from one step's end to the next one's."""

        def on_start(self, config: Any, state: TrainState, model: Any) -> None:
            READS.period = f"step {state.iteration + 1}"

        def after_step(self, state: TrainState, result: StepResult) -> None:
            if mistake == "read":
                float(result.loss)
            READS.period = f"step {state.iteration + 1}"

        def on_end(self, state: TrainState) -> None:
            READS.period = "end"

    def loss_with_host_tensor(logits: Any, labels: Any) -> Any:
        import torch
        import torch.nn.functional as F

        losses = F.cross_entropy(logits, labels, reduction="none")
        return losses * torch.ones(labels.shape)

    loss = loss_with_host_tensor if mistake == "host tensor" else None
    pretrain(Extensions(callbacks=(Periods(),), loss=loss))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    main()
