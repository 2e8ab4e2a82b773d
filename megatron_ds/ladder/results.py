"""The laws of a ladder's losses, the predicted loss of the large run, and whether it held."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron_ds.config.problems import user_error
from megatron_ds.ladder.options import Fit as FitOptions
from megatron_ds.ladder.options import Judge
from megatron_ds.ladder.records import (
    FIT,
    FORMAT,
    LadderRecord,
    RunEntry,
    read_json,
    read_ladder,
    write_json,
)
from megatron_ds.ladder.runs import final_loss, history_of
from megatron_ds.launch.exit_codes import ExitCode
from megatron_ds.reports.history import History, read_run
from megatron_ds.scaling.law import Array, Fit, Law, fit

BY_OPERATIONS = ("operations",)
BY_PARAMETERS_AND_TOKENS = ("parameters", "tokens")
VARIABLES = (BY_OPERATIONS, BY_PARAMETERS_AND_TOKENS)
"""Variables of the laws; the last one with enough runs makes the prediction."""
DIFFERENT_RATIO = 1.2
"""Factor of tokens per parameter from which two runs do not have the same."""
LEAST_SIZES = 3
"""Sizes of models that a law by operations needs, as it has coefficients."""


@dataclass(frozen=True)
class Measured:
    """A complete run with its final validation loss."""

    run: RunEntry
    loss: float


@dataclass(frozen=True)
class Prediction:
    """The loss of the large run, in nats per token."""

    terms: tuple[str, ...]
    """Variables of the law that makes it."""
    loss: float
    low: float
    high: float
    level: float

    def text(self) -> str:
        return f"{self.loss:.4f}, {self.level:.0%} between {self.low:.4f} and {self.high:.4f}"


@dataclass(frozen=True)
class Results:
    """What the losses of a ladder say."""

    ladder: LadderRecord
    measured: tuple[Measured, ...]
    fits: tuple[Fit, ...]
    """By operations, and with enough runs by parameters and tokens."""
    prediction: Prediction


def measured_runs(ladder: LadderRecord) -> tuple[Measured, ...]:
    """The complete runs of a ladder."""
    result = []
    for run in ladder.runs:
        history = history_of(ladder, run)
        loss = None if history is None else final_loss(history, run.steps)
        if loss is not None:
            result.append(Measured(run, loss))
    return tuple(result)


def fit_ladder(ladder: LadderRecord, options: FitOptions) -> Results:
    """Fits the laws that the runs can determine, and predicts the loss of the large run.

    The law by operations is of the runs whose tokens per parameter are nearest to the large run's.

    Raises:
        UserError: If too few runs are complete.
    """
    measured = measured_runs(ladder)
    fits = []
    for terms in VARIABLES:
        used = _runs_for(terms, measured, ladder.target)
        if used:
            variables = values_of(terms, [item.run for item in used])
            losses = np.array([item.loss for item in used])
            fits.append(
                fit(
                    terms,
                    variables,
                    losses,
                    resamples=options.resamples,
                    least_noise=options.noise,
                )
            )
    if not fits:
        raise user_error("ladder-with-too-few-runs", complete=len(measured), needed=LEAST_SIZES)
    prediction = predict(fits[-1], ladder.target, options.level)
    return Results(ladder, measured, tuple(fits), prediction)


def values_of(terms: Sequence[str], runs: Sequence[RunEntry]) -> Array:
    """Variables of a law for runs, `[R, T]`."""
    return np.array([[float(getattr(run, term)) for term in terms] for run in runs])


def predict(result: Fit, run: RunEntry, level: float) -> Prediction:
    """The loss of a run by a law."""
    variables = values_of(result.law.terms, [run])[0].tolist()
    low, high = result.interval(*variables, level=level)
    return Prediction(result.law.terms, result.law.loss(*variables), low, high, level)


def _runs_for(
    terms: tuple[str, ...], measured: Sequence[Measured], target: RunEntry
) -> list[Measured]:
    """The runs for a law; none if they cannot determine it."""
    if terms == BY_OPERATIONS:
        ratios = [abs(np.log(item.run.ratio / target.ratio)) for item in measured]
        limit = min(ratios, default=0.0) + np.log(DIFFERENT_RATIO)
        used = [item for item, ratio in zip(measured, ratios, strict=True) if ratio <= limit]
        return used if len({item.run.parameters for item in used}) >= LEAST_SIZES else []
    ratios = sorted(item.run.ratio for item in measured)
    is_varied = bool(ratios) and ratios[-1] / ratios[0] > DIFFERENT_RATIO
    pairs = {(item.run.parameters, item.run.tokens) for item in measured}
    return list(measured) if is_varied and len(pairs) > 1 + 2 * len(terms) else []


def law_text(law: Law) -> str:
    """The formula of a law with its numbers."""
    symbols = {"operations": "C", "parameters": "N", "tokens": "D"}
    terms = zip(law.terms, law.scales, law.exponents, strict=True)
    parts = [f"{np.exp(scale):.4g} / {symbols[name]}^{power:.4g}" for name, scale, power in terms]
    return f"L({', '.join(symbols[name] for name in law.terms)}) = " + " + ".join(
        [f"{law.irreducible:.4g}", *parts]
    )


def write_fit(results: Results) -> None:
    """Writes FOLDER/fit.json."""
    content = {
        "format": FORMAT,
        "runs": [{"name": item.run.name, "loss": item.loss} for item in results.measured],
        "laws": [_law_values(item) for item in results.fits],
        "prediction": dataclasses.asdict(results.prediction),
        "target": dataclasses.asdict(results.ladder.target),
    }
    write_json(results.ladder.folder / FIT, content)


def _law_values(result: Fit) -> dict[str, Any]:
    """A law with its resampled laws, as plain values."""
    return dataclasses.asdict(result.law) | {
        "noise": result.noise,
        "resampled": np.round(result.resampled, 9).tolist(),
    }


def _read_fit(values: dict[str, Any]) -> Fit:
    """The inverse of `_law_values`."""
    law = Law(
        tuple(values["terms"]),
        float(values["floor"]),
        tuple(values["scales"]),
        tuple(values["exponents"]),
    )
    return Fit(law, float(values["noise"]), np.array(values["resampled"]))


def judge(options: Judge, _: Sequence[str] = ()) -> int:
    """Prints whether the large run's final loss is in the interval; returns the exit status.

    Raises:
        UserError: If the ladder has no fit, or the run is of another model or not evaluated.
    """
    ladder = read_ladder(Path(options.folder))
    path = ladder.folder / FIT
    if not path.is_file():
        raise user_error("ladder-not-fitted", folder=options.folder)
    content = read_json(path)
    history = read_run(Path(options.run))
    _check_model(history, ladder.target)
    steps = int(history["iteration"][-1])
    loss = final_loss(history, steps)
    if loss is None:
        raise user_error("ladder-run-not-evaluated", "run", run=options.run, iteration=steps)
    tokens = float(history["consumed_tokens"][-1])
    target = ladder.target
    trained = dataclasses.replace(
        target,
        steps=steps,
        tokens=int(tokens),
        operations=target.operations * tokens / target.tokens,
    )
    level = float(content["prediction"]["level"])
    prediction = predict(_read_fit(content["laws"][-1]), trained, level)
    holds = prediction.low <= loss <= prediction.high
    if abs(tokens / target.tokens - 1) > 0.01:
        print(f"the run has trained on {tokens:,.0f} tokens, planned were {target.tokens:,}")
    print(f"predicted {prediction.text()}")
    print(
        f"measured  {loss:.4f}, {loss / prediction.loss - 1:+.2%}: "
        f"{'inside' if holds else 'OUTSIDE'} of the interval"
    )
    return ExitCode.FINISHED if holds else ExitCode.ERROR


def _check_model(history: History, target: RunEntry) -> None:
    """Raises a UserError if a run has recorded sizes of another model than the large one."""
    expected = {"--hidden-size": target.hidden_size, "--num-layers": target.layers}
    for flag, size in expected.items():
        value = history.settings.get(flag)
        if value not in (None, size):
            raise user_error("ladder-of-other-model", "run", name=flag, value=value, size=size)
