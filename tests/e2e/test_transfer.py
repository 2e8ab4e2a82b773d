"""The best learning rate of a small model is that of a large one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import transfer

MINUTES = 20


@pytest.mark.proof
def test_the_best_rate_transfers_with_mup_alone(tmp_path: Path) -> None:
    """Claim (precision): with muP the best learning rates at width 64 and at 512, and at depth 2
    and at 16, agree within a factor of 1.4; without it those of the widths do not, and the deeper
    model has a larger loss at the rate of the base"""
    output = tmp_path / "transfer.json"
    options = transfer.parse(["--output", str(output), "--workers", "2"])
    transfer.run(options)
    runs = transfer.recorded_runs(output)
    assert len(json.loads(output.read_text())["runs"]) == 195
    for study in transfer.studies(options):
        assert transfer.factors(options, runs, study)[transfer.MUP] <= transfer.TOLERANCE, study
    assert transfer.factors(options, runs, "width")[transfer.PLAIN] > transfer.TOLERANCE
    # Over depths the best rate without it is hardly further away than those of two seeds.
    _, losses = transfer.losses_at_base_rate(options, runs, "depth")
    assert losses[transfer.PLAIN] > losses[transfer.MUP] + 0.05
    assert sum(result.cpu_seconds for result in runs.values()) <= 2 * 60 * MINUTES
