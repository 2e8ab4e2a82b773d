"""`--load` is resolved once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint import restoring
from megatron_ds.config import Config, ModelConfig
from megatron_ds.conversion.weights_folder import write_weights_folder
from megatron_ds.loading import initial_load, plan
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.training.run import complete_settings
from megatron_ds.training.start import preflight
from tests.unit.checkpoint.fakes import Managers, run_of, save
from tests.unit.conversion.models import SMALL, random_source


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that list a folder, select a checkpoint, or open another one."""
    called = list[str]()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **options: called.append(name) or function(*args, **options)
        )

    for module in (plan, restoring):
        count(module, "list_folder")
        count(module, "select_checkpoint")
    count(initial_load, "_open")
    return called


def test_a_resume_selects_once_before_the_ranks_select_together(
    manager: Managers, config: Config, calls: list[str]
) -> None:
    save(manager(), 3, 6)
    own = config.with_values({"use_checkpoint_opt_param_scheduler": True})

    merged, planned, problems = complete_settings(own, 1, lambda problem: None)
    problems += preflight._checkpoint_problems(merged, planned, 1, None)

    assert (problems, calls) == ([], ["list_folder", "select_checkpoint"])
    assert planned.saved is not None
    assert (planned.saved.iteration, planned.saved.read_lock) == (6, None)
    found = manager().select()
    assert (found, calls) == (planned.saved, ["list_folder", "select_checkpoint"] * 2)


def test_weights_are_opened_once(tmp_path: Path, calls: list[str]) -> None:
    write_weights_folder(random_source(ModelConfig(**SMALL)), tmp_path / "weights")
    tokenizer = NullTokenizer(49)
    run = run_of(tmp_path / "weights")

    config, planned, problems = complete_settings(run, 1, lambda problem: None)
    problems += preflight._checkpoint_problems(config, planned, 1, tokenizer)
    assert planned.imported is not None
    InitialLoad.of(planned.imported, config.with_vocab(tokenizer.vocab_size))

    assert (problems, calls) == ([], ["list_folder", "_open"])
