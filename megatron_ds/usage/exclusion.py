"""A fork of a run that excludes documents, at a step before which the run has read them."""

from __future__ import annotations

import os

from megatron_ds.config import Config
from megatron_ds.config.problems import renaming_fields
from megatron_ds.launch.output import print_error
from megatron_ds.loading import fork
from megatron_ds.usage.options import Options


def fork_without_documents(options: Options) -> str:
    """Forks the run at the checkpoint of --step, without the documents of --exclude.

    Returns:
        The command that starts the fork.

    Raises:
        UserError: If there is no such checkpoint, or the run cannot be forked.
    """
    assert options.exclude is not None
    assert options.step is not None
    assert options.save is not None
    settings = Config().with_values({"exclude_documents": os.path.abspath(options.exclude)})
    names = frozenset({"run", "at", "save", "exclude_documents"})
    with renaming_fields(at="step"):
        request = fork.Options(options.run, options.step, options.save, settings, names)
        return fork.fork(request, lambda problem: print_error(problem.render()))
