"""`--load` is resolved once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_ds.checkpoint import restoring
from megatron_ds.config import Config, ModelConfig
from megatron_ds.conversion.foreign import recognition
from megatron_ds.conversion.weights_folder import write_weights_folder
from megatron_ds.conversion.weights_locations import is_hf
from megatron_ds.loading import initial_load, plan
from megatron_ds.loading.initial_load import InitialLoad
from megatron_ds.loading.plan import make_plan, model_options
from megatron_ds.tokenizer.null import NullTokenizer
from megatron_ds.training.run import complete_settings
from megatron_ds.training.start import preflight
from tests.problems import codes, fields
from tests.unit.checkpoint.fakes import Managers, run_of, save
from tests.unit.conversion.foreign_trees import REFUSED, TREES, write_tree
from tests.unit.conversion.models import SMALL, random_source


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the functions that list a folder, detect Megatron's files in it, select a
    checkpoint, or open another one."""
    called = list[str]()

    def count(module: Any, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *args, **options: called.append(name) or function(*args, **options)
        )

    for module in (plan, restoring):
        count(module, "list_folder")
        count(module, "select_checkpoint")
    for module in (plan, initial_load, recognition):
        count(module, "detect_megatron")
    count(initial_load, "_open")
    return called


def test_a_resume_selects_once_before_the_ranks_select_together(
    manager: Managers, config: Config, calls: list[str]
) -> None:
    save(manager(), 3, 6)
    own = config.with_values({"use_checkpoint_opt_param_scheduler": True})

    merged, planned, problems = complete_settings(own, 1, lambda problem: None)
    problems += preflight._checkpoint_problems(merged, planned, 1, None)

    assert (problems, calls) == ([], ["detect_megatron", "list_folder", "select_checkpoint"])
    assert planned.saved is not None
    assert (planned.saved.iteration, planned.saved.read_lock) == (6, None)
    found = manager().restoring.select()
    assert (found, calls) == (
        planned.saved,
        ["detect_megatron", *["list_folder", "select_checkpoint"] * 2],
    )


def test_weights_are_opened_once(tmp_path: Path, calls: list[str]) -> None:
    write_weights_folder(random_source(ModelConfig(**SMALL)), tmp_path / "weights")
    tokenizer = NullTokenizer(49)
    run = run_of(tmp_path / "weights")

    config, planned, problems = complete_settings(run, 1, lambda problem: None)
    problems += preflight._checkpoint_problems(config, planned, 1, tokenizer)
    assert planned.imported is not None
    InitialLoad.of(planned.imported, config.with_vocab(tokenizer.vocab_size))

    assert problems == []
    opening = ["_open", "detect_megatron"]  # which recognizes the format
    assert calls == ["detect_megatron", "list_folder", *opening]


@pytest.mark.parametrize("name", REFUSED)
def test_another_programs_checkpoint_is_one_problem(name: str, tmp_path: Path) -> None:
    """Whatever format is given, and also if flags describe the model: a run would start with random
    weights. A plan needs no weights.

    Claim (checkpoints): a checkpoint of another program that is not read is refused by the
    program's name, with what reads it
    """
    folder = write_tree(name, tmp_path / "foreign")
    code = TREES[name]["code"]
    for load in (str(folder), f"hf:{folder}", f"megatron:{folder}"):
        for model in ({}, {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2}):
            _, planned, problems = make_plan(run_of(load, **model))
            assert (codes(problems), fields(problems)) == ([code], [("load",)])
            assert planned.imported is None
        of_plan = model_options(run_of(load), lambda problem: None)[1]
        assert is_hf(folder) or codes(of_plan) == [code]


def test_another_programs_weights_to_start_from_are_one_problem(tmp_path: Path) -> None:
    folder = write_tree("nanochat", tmp_path / "foreign")
    _, _, problems = make_plan(run_of(tmp_path / "new", pretrained_checkpoint=str(folder)))
    assert codes(problems) == ["foreign-nanochat"]
    assert fields(problems) == [("pretrained_checkpoint",)]


def test_a_save_folder_may_have_other_programs_files_below_it(tmp_path: Path) -> None:
    write_tree("nanochat", tmp_path / "exports")
    run = run_of(tmp_path, num_layers=2, save=str(tmp_path))
    assert make_plan(run)[2] == []
    write_tree("nanochat", tmp_path)
    assert codes(make_plan(run)[2]) == ["foreign-nanochat"]


def test_a_file_is_one_problem(tmp_path: Path) -> None:
    folder = write_tree("nanoGPT", tmp_path)
    for file, code in ((folder / "ckpt.pt", "foreign-nanogpt"), (__file__, "load-is-a-file")):
        for run in (run_of(file), run_of(file, num_layers=2, save=str(tmp_path / "new"))):
            assert codes(make_plan(run)[2]) == [code]
