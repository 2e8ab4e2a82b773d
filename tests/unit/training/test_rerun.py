"""What is compared of the attempts of a step, and the cause that follows from what the ranks found.

The attempts themselves are tested in tests/dist/test_nonfinite.py.
"""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import MagicMock

import pytest

from megatron_ds.config import Config
from megatron_ds.launch.exit_codes import ExitCode, RunAborted
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.train_state import StepResult
from megatron_ds.training.rerun import Difference, Finding, Rerun, differences

NAN = math.nan
LOSS = "the loss of micro-batch 1"
BIAS = "the gradient of bias"
WEIGHT = "the gradient of weight"
STATUSES = {
    "rank-at-fault": ExitCode.FAULTY_RANK,
    "weights-not-finite-in-step": ExitCode.SKIPPED_STEPS,
}
GOOD = {LOSS: 2.0, BIAS: 1e-9, WEIGHT: 1.0}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({LOSS: 2.001, WEIGHT: 1.0009}, None),
        ({BIAS: 5e-9}, None),  # rounding errors alone, next to the norm of all gradients
        ({LOSS: 2.01}, (LOSS, 2.0, 2.01)),
        ({WEIGHT: 0.9, BIAS: 0.1}, (BIAS, 1e-9, 0.1)),
        ({WEIGHT: math.inf}, (WEIGHT, 1.0, math.inf)),
    ],
)
def test_values_differ_by_more_than_rounding(
    changes: dict[str, float], expected: tuple[str, float, float] | None
) -> None:
    """In either order, with the worse value last."""
    for first, second in ((GOOD, GOOD | changes), (GOOD | changes, GOOD)):
        assert next(differences(first, second, 1e-3), None) == expected


def test_values_that_are_not_finite_are_equal() -> None:
    assert [*differences({LOSS: NAN, BIAS: math.inf}, {LOSS: math.inf, BIAS: NAN}, 0.0)] == []


def rerun(**changes: Any) -> Rerun:
    none: Any = None
    config = Config().with_values({"rerun_mode": "validate_results", **changes})
    save = MagicMock(return_value="Resume from global_step4")
    return Rerun(config, Mesh.single(), none, none, none, save, none)


def finding(rank: int, **values: Any) -> Finding:
    nothing = {"changed": None, "moved": None, "suspect": rank, "worst": (1.0, ""), "weight": None}
    return Finding(**{"host": f"node{rank}", **nothing, **values})


@pytest.mark.parametrize(
    ("of_rank", "repeated", "code", "words"),
    [
        ({1: {"changed": Difference(LOSS, 2.0, NAN)}}, "", "step-not-reproduced",
         "on rank 1 (node1) the loss of micro-batch 1 is nan and not 2"),
        ({}, "", "step-not-reproduced", "only a sum differs"),
        ({0: {"moved": Difference(WEIGHT, 1.0, 9.0), "suspect": 2},
          2: {"moved": Difference(BIAS, 1.0, 8.0)}, 1: {"changed": Difference(LOSS, 2.0, 3.0)}},
         "on the same and on exchanged ranks", "rank-at-fault", "on rank 2 (node2) "),
        ({2: {"worst": (math.inf, "the worst")}}, "on the same and on exchanged ranks",
         "step-reproduced", "the data or the model. Worst value: the worst. "),
        ({}, "on the same ranks", "step-reproduced", "the model, or a device, "),
        ({1: {"weight": "bias", "moved": Difference(LOSS, 2.0, NAN)}}, "on the same ranks",
         "weights-not-finite-in-step", "on rank 1 (node1) bias was not. Resume from global_step4"),
    ],
)  # fmt: skip
def test_the_cause_follows_from_what_the_ranks_found(
    of_rank: dict[int, Any], repeated: str, code: str, words: str, capsys: Any
) -> None:
    """Claim (non-finite): the rank whose value is the worse one is named among any number of
    data-parallel ranks, with its host"""
    findings = [finding(rank, **of_rank.get(rank, {})) for rank in range(3)]
    bad = StepResult(NAN, NAN, skipped=True)
    status = None
    text = ""
    try:
        rerun()._conclude(7, bad, findings, repeated)
    except RunAborted as error:
        status = error.code
        text = str(error)
    assert status == STATUSES.get(code)
    text += capsys.readouterr().out
    assert "iteration 7: the gradient is not finite" in text
    assert f"[{code}]" in text
    assert words in text


def test_overflows_of_a_dynamic_loss_scale_are_expected() -> None:
    skipped = StepResult(1.0, math.inf, skipped=True, loss_scale=4.0)
    spent = StepResult(1.0, math.inf, skipped=True, loss_scale=1.0, loss_scale_exhausted=True)
    spike = StepResult(9.0, 1.0, skipped=True, loss_scale=4.0, is_spike=True)
    dynamic = rerun()
    static = rerun(fp16=True, loss_scale=4.0)
    assert [dynamic._is_bad(result) for result in (skipped, spent, spike)] == [False, True, True]
    assert static._is_bad(skipped)
    assert not static._is_bad(StepResult(1.0, 1.0, loss_scale=4.0))
