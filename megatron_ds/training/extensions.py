"""What a program of its own adds to a run: loggers and callbacks. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.train_state import StepResult, TrainState
from megatron_ds.training.records import Logger


class Callback:
    """Is called at given points of a run, on every rank; this base class does nothing.

    An exception ends the run, as any error does. A method that communicates must do so on all
    ranks.
    """

    def on_start(self, config: Config, state: TrainState, model: Any) -> None:
        """Called before the first step.

        Args:
            config: Complete configuration of the run.
            state: State from which the run starts, that of the checkpoint if it resumes.
            model: This rank's `torch.nn.Module`; with ZeRO-3 its parameters are partitioned.
        """

    def after_step(self, state: TrainState, result: StepResult) -> None:
        """Called after each optimizer step, applied or skipped.

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


OpenLogger = Callable[[Config, TrainState], Logger]


@dataclass(frozen=True)
class Extensions:
    """What a run has in addition to, or instead of, the package's own parts."""

    loggers: Sequence[OpenLogger] = ()
    """Each opens a logger, on the last rank: called with the configuration and the state from
    which the run starts. A subclass of `Logger` with these arguments is such a callable."""
    callbacks: Sequence[Callback] = ()
    """Called in this order."""

    def problems(self) -> Iterator[Problem]:
        """What is of another type, or is called with other arguments, than its field says."""
        for number, callback in enumerate(self.callbacks):
            if not isinstance(callback, Callback):
                name, kind = f"callbacks[{number}]", "an object of a subclass of Callback"
                yield Problem("extension-of-other-type", name=name, value=callback, kind=kind)
        for number, logger in enumerate(self.loggers):
            yield from _call_problems(f"loggers[{number}]", logger, "config, state")


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
    named: Any = extension if hasattr(extension, "__qualname__") else type(extension)
    return f"{named.__module__}.{named.__qualname__}"
