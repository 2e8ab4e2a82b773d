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
    and at 16, agree within a factor of 1.4; without it they do not"""
    output = tmp_path / "transfer.json"
    options = transfer.parse(["--output", str(output), "--workers", "2"])
    transfer.run(options)
    runs = transfer.recorded_runs(output)
    assert len(json.loads(output.read_text())["runs"]) == 165
    for study in transfer.studies(options):
        factors = transfer.factors(options, runs, study)
        assert factors[transfer.MUP] <= transfer.TOLERANCE, study
        assert factors[transfer.PLAIN] > transfer.TOLERANCE, study
    assert sum(result.cpu_seconds for result in runs.values()) <= 2 * 60 * MINUTES
