"""Index caches that are built ahead are those that a run looks for, on any layout."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.data import build_datasets, lazy_indexes
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.loading.plan import LoadPlan
from megatron_ds.run_phases import RunPhases
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.train_state import TrainState
from megatron_ds.training.run import complete_settings
from megatron_ds.training.start import prepare_cache
from megatron_ds.training.start.data_length import open_data
from megatron_ds.training.start.preflight import RunInputs
from megatron_ds.training.start.run_data import build_phase_data
from tests.token_files import write_pair

FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 "
    "--global-batch-size 8 --lr 1e-3 --train-iters 40 --tokenizer-type NullTokenizer "
    "--vocab-size 120 --eval-iters 2 --split 80,10,10 --fp16 --data-path 0.3 a 0.7 b"
)


def test_a_run_on_any_layout_builds_no_index_that_was_built_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim (samples): `tools/prepare_cache.py` builds all indexes of a run, also of very large
    blends, and a run on any layout builds none"""
    monkeypatch.chdir(tmp_path)
    draw = np.random.default_rng(0)
    for name in ("a", "b"):
        write_pair(tmp_path / name, [draw.integers(0, 120, 40) for _ in range(90)])
    monkeypatch.setattr(build_datasets, "OPENED_AT_START", 0)
    assert prepare_cache.main(["--world-size", "4", *FLAGS.split()]) == os.EX_OK
    assert "complete" in capsys.readouterr().out
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "index-cache").iterdir()}
    assert sum(path.suffix == ".json" for path in files) == 6  # of both files, for each split

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("an index is built")

    monkeypatch.setattr(lazy_indexes, "build_indexes", fail)
    for size, layout in (
        (1, ""),
        (8, "--tensor-model-parallel-size 2 --use-distributed-optimizer"),
    ):
        plans: list[LoadPlan] = []

        def complete(*arguments: Any, plans: list[LoadPlan] = plans) -> Any:
            config, plan, problems = complete_settings(*arguments)
            plans.append(plan)
            return config, problems

        words = f"{FLAGS} {layout}".split()
        config, problems = build_config(
            words, world_size=size, warn=lambda _: None, complete=complete
        )
        assert problems == []
        inputs = RunInputs(plans[0], NullTokenizer(120), (open_data(config.data),))
        dp_size = RunPhases(config, config.parallel.data_parallel_size(size)).dp_size
        inputs.data[0].opens_all = True
        data = build_phase_data(config, inputs, dp_size, TrainState(), None)
        assert data.train is not None
        assert len(data.train) == 320
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert {*(tmp_path / "index-cache").iterdir()} == files.keys()
    wrong = [*FLAGS.split(), "--data-path", "nothing"]
    assert prepare_cache.main(wrong) == int(ExitCode.BAD_SETTINGS)
