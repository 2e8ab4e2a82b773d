"""Extensions of a run by a program: dataset, loss, layer, loggers, callbacks. Imports no torch."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsFloat

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.data.own.dataset_request import BuildDataset
from megatron_ds.train_state import StepResult, TrainState
from megatron_ds.training.records import STEP_FIELDS, Logger


class RunControl:
    """What callbacks may do to a run: the attribute `control` of each.

    Every rank has one. What is asked for takes effect after the methods of all callbacks at that
    point, before a checkpoint is saved there.
    """

    def __init__(self) -> None:
        self.is_stopped = False
        """Whether `stop` was called."""
        self.reason = ""
        """Its argument."""
        self._factor = 1.0
        self._figures: dict[str, float] = {}

    def stop(self, reason: str = "") -> None:
        """Ends the run after this step, with a checkpoint and status 0. One rank is enough.

        Args:
            reason: What the log says of it.
        """
        self.is_stopped = True
        self.reason = reason

    @property
    def learning_rate_factor(self) -> float:
        """Factor of the scheduled learning rates from the next step on.

        It is 1 at first, is saved in checkpoints, and stays when a run is resumed, with the
        callback or without. All ranks must set the same value.

        Raises:
            UserError: If it is set to a negative number, inf or nan.
        """
        return self._factor

    @learning_rate_factor.setter
    def learning_rate_factor(self, value: float) -> None:
        if not (math.isfinite(value) and value >= 0):
            raise user_error("bad-learning-rate-factor", value=value)
        self._factor = float(value)

    def log(self, **figures: SupportsFloat) -> None:
        """Logs figures by name with the metrics of a step: in `after_step` of that step, elsewhere
        of the next one.

        They are not averaged: the first rank prints its own, the last one writes its own to files.

        Args:
            figures: Numbers by name.

        Raises:
            UserError: If a metric of every run has that name.
        """
        if taken := STEP_FIELDS & figures.keys():
            raise user_error("figure-name-taken", names=", ".join(sorted(taken)))
        self._figures |= {name: float(value) for name, value in figures.items()}

    def take_figures(self) -> dict[str, float]:
        """The figures since the last call."""
        figures = self._figures
        self._figures = {}
        return figures


class Callback:
    """Is called at given points of a run, on every rank; this base class does nothing.

    An exception ends the run, as any error does. A method that communicates must do so on all
    ranks.

    Attributes:
        control: Stops the run, changes its learning rate and logs figures. It is set before
            `on_start`.
    """

    control: RunControl

    def on_start(self, config: Config, state: TrainState, model: Any) -> None:
        """Called before the first step.

        Args:
            config: Complete configuration of the run.
            state: State from which the run starts, the checkpoint's if it resumes.
            model: This rank's `torch.nn.Module`; with ZeRO-3 its parameters are partitioned.
        """

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Called after each optimizer step, applied or skipped, before its metrics are logged.

        Args:
            state: State after the step.
            result: Outcome on this rank. Its loss may be a tensor on the device, for which
                `float` waits.
        """

    def before_save(self, state: TrainState) -> None:
        """Called before each checkpoint in --save."""

    def after_evaluation(self, state: TrainState, split: str, losses: Mapping[str, float]) -> None:
        """Called after each evaluation that was not interrupted.

        Args:
            state: State that was evaluated.
            split: "validation" or "test".
            losses: Mean loss by the name of the dataset, which is "" if it has none.
        """

    def on_end(self, state: TrainState) -> None:
        """Called at the end of a run without an error."""


CUSTOM_PARTS = {"dataset": "request", "loss": "logits, labels", "layer": "builder"}
"""Fields of functions that replace the package's own, and their arguments."""
OpenLogger = Callable[[Config, TrainState], Logger]


@dataclass(frozen=True, kw_only=True)
class Extensions:
    """Parts of a run in addition to, or instead of, the package's own."""

    dataset: BuildDataset | None = None
    """Called for each split with a `DatasetRequest`; returns a dataset with a length, whose items
    are integers [seq_length + 1], or None. Instead of --data-path and its relatives."""
    loss: Callable[[Any, Any], Any] | None = None
    """Called with logits [tokens, vocabulary] in fp32 and labels [tokens]; returns the loss of each
    token, [tokens], which must depend on its own row only. Instead of the cross entropy, in the
    evaluation, too."""
    layer: Callable[[Any], Any] | None = None
    """Called with a `LayerBuilder` for each transformer layer; returns a `Block`."""
    loggers: Sequence[OpenLogger] = ()
    """Each opens a logger, on the last rank: called with the configuration and the state from
    which the run starts. A subclass of `Logger` with these arguments is such a callable."""
    callbacks: Sequence[Callback] = ()
    """Called in this order."""

    def with_observer(self, callback: Callback, logger: OpenLogger) -> Extensions:
        """These parts with a further callback and a further logger."""
        callbacks = (*self.callbacks, callback)
        return dataclasses.replace(self, callbacks=callbacks, loggers=(*self.loggers, logger))

    def custom_parts(self) -> dict[str, str]:
        """The names of the functions that replace the package's own, by field."""
        parts = {name: getattr(self, name) for name in CUSTOM_PARTS}
        return {name: qualified_name(part) for name, part in parts.items() if part is not None}

    def problems(self) -> Iterator[Problem]:
        """Yields parts whose type or arguments differ from the field's declaration."""
        for name, arguments in CUSTOM_PARTS.items():
            if (part := getattr(self, name)) is not None:
                yield from _call_problems(name, part, arguments)
        for index, callback in enumerate(self.callbacks):
            if not isinstance(callback, Callback):
                name = f"callbacks[{index}]"
                expected = "an object of a subclass of Callback"
                yield Problem("extension-of-other-type", name=name, value=callback, kind=expected)
        for index, logger in enumerate(self.loggers):
            yield from _call_problems(f"loggers[{index}]", logger, "config, state")


def _call_problems(name: str, value: object, arguments: str) -> Iterator[Problem]:
    """Whether a value cannot be called with positional arguments of these names."""
    call = f"a function of ({arguments})"
    if not callable(value):
        yield Problem("extension-of-other-type", name=name, value=value, kind=call)
        return
    try:
        inspect.signature(value).bind(*arguments.split(", "))
    except TypeError as error:
        yield Problem("extension-with-other-arguments", name=name, call=call, error=error)
    except ValueError:
        return  # a function of a C extension, whose signature is unknown


def qualified_name(extension: object) -> str:
    """The name of a function or class, or of an object's class, with its module."""
    while isinstance(extension, functools.partial):
        extension = extension.func
    named: Any = extension if hasattr(extension, "__qualname__") else type(extension)
    return f"{named.__module__}.{named.__qualname__}"
