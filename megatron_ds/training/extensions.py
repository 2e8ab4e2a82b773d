"""Extensions of a run by a program: dataset, loss, layer, loggers, callbacks. Imports no torch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.data.own.dataset_request import BuildDataset
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
            state: State from which the run starts, the checkpoint's if it resumes.
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
