"""A run whose ranks share every sequence gives the losses and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ds.checkpoint.full_weights import lazy_full_weights
from megatron_ds.checkpoint.metadata import read_run
from tests.e2e.runs import Launcher, Settings, evaluations, records, steps

APPROXIMATE = {"lm_loss", "grad_norm", "validation_loss", "test_loss", "ppl"}
"""Keys of records that depend on the order of sums."""


def test_sequence_parallel_run_equals_one_process(
    launcher: Launcher, base: Settings, tmp_path: Path
) -> None:
    settings = {
        **base,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "zero_stage": 3,
        "global_batch_size": 4,
        "train_iters": 2,
        "eval_iters": 2,
        "eod_mask_loss": True,
        "reset_position_ids": True,
        "reset_attention_mask": True,
    }
    single, shared = tmp_path / "single", tmp_path / "shared"
    launcher.start({**settings, "save": single}).succeed()
    parallel = {"context_parallel_size": 2, "cp_comm_type": "a2a"}
    output = launcher.start({**settings, **parallel, "save": shared}, ranks=2).succeed()

    banner = " ".join(output.split())
    assert "sequence parallel 2 (Ulysses) x data parallel 1" in banner
    assert "4 samples = micro-batch 2 x data parallel 1 x accumulation 2; 128 tokens" in banner
    ours, expected = (steps(run) + evaluations(run) for run in (shared, single))
    for record, other in zip(ours, expected, strict=True):
        for name in APPROXIMATE & other.keys():
            assert record.pop(name) == pytest.approx(other.pop(name), rel=1e-5)
        assert record == other
    # Work per second of a process: the sequences are counted once.
    work, all_work = (
        [each["tflops"] * each["seconds"] for each in records(run) if "tflops" in each]
        for run in (shared, single)
    )
    assert work == pytest.approx([each / 2 for each in all_work], rel=0.01)

    weights, others = (
        {n: t.read() for n, t in lazy_full_weights(read_run(run / "global_step2"))}
        for run in (shared, single)
    )
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], rtol=1e-4, atol=1e-5)
