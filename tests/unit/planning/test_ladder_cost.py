"""The ladder that leads to a planned run."""

from __future__ import annotations

import json
import shlex

import pytest

from megatron_ds.planning import command as tool
from megatron_ds.scaling.rungs import DEFAULT_BUDGET

LARGE = shlex.split(
    "--world-size 64 --num-layers 24 --hidden-size 2048 --num-attention-heads 32 --bf16 "
    "--seq-length 2048 --micro-batch-size 4 --global-batch-size 256 --vocab-size 32000 "
)


def test_a_plan_has_a_ladder_with_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    """Claim (command-line): `tools/plan.py` shows the ladder of 1 % of a run's operations, and how
    long it takes"""
    assert not tool.main([*LARGE, "--tokens", "50B", "--json"])
    plan = json.loads(capsys.readouterr().out)
    ladder = plan["ladder"]
    operations = plan["flops_per_step"] * 50e9 / plan["tokens_per_step"]
    assert 0.3 * DEFAULT_BUDGET < ladder["operations"] / operations <= 1.01 * DEFAULT_BUDGET
    assert [run["parameters"] for run in ladder["runs"]] == sorted(
        run["parameters"] for run in ladder["runs"]
    )
    assert ladder["hours_on_one_device"] == pytest.approx(
        sum(run["hours_on_one_device"] for run in ladder["runs"])
    )
    # A device reaches less than its peak.
    peak = plan["hardware"]["tflops_16"] * 1e12
    assert ladder["operations"] / peak < 3600 * ladder["hours_on_one_device"]
    assert not tool.main([*LARGE, "--tokens", "50B"])
    shown = capsys.readouterr().out
    for run in ladder["runs"]:
        assert f"{run['parameters']:,}" in shown


def test_the_smallest_sizes_are_shown_where_the_budget_suffices_for_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--num-attention-heads", "8", "--tokens", "50B", "--json"]
    assert not tool.main([*LARGE, *words])
    plan = json.loads(capsys.readouterr().out)
    operations = plan["flops_per_step"] * 50e9 / plan["tokens_per_step"]
    assert plan["ladder"]["operations"] > DEFAULT_BUDGET * operations
    assert [run["hidden_size"] for run in plan["ladder"]["runs"]] == [256, 512, 768]


@pytest.mark.parametrize(
    "words",
    [[], ["--tokens", "50B", "--num-attention-heads", "1"]],
    ids=["of no length", "of one head"],
)
def test_a_plan_without_a_ladder_has_none(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert not tool.main([*LARGE, *words, "--json"])
    assert json.loads(capsys.readouterr().out)["ladder"] is None
