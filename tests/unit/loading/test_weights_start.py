"""Options and weights of a run that starts from a Hugging Face model or a folder of weights."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from huggingface_hub.errors import LocalEntryNotFoundError

from megatron_ds.checkpoint.location import Location
from megatron_ds.checkpoint.metadata import MANIFEST, Checkpoint, manifest_text, read_manifest
from megatron_ds.checkpoint.store.mirror import STAGING_LOCK
from megatron_ds.config import CheckpointConfig, Config, ModelConfig, TokenizerConfig
from megatron_ds.conversion.huggingface.read_write import open_hf
from megatron_ds.conversion.megatron.detect import detect_megatron
from megatron_ds.conversion.safetensors_files import SINGLE
from megatron_ds.conversion.weights_folder import write_weights_folder
from megatron_ds.fileio.atomic import FileRecord
from megatron_ds.fileio.file_lock import lock_now
from megatron_ds.loading import plan
from megatron_ds.loading.initial_load import InitialLoad, check_import, conflicts, find_importable
from megatron_ds.loading.locations import locate_weights, staged_location
from megatron_ds.loading.plan import make_plan
from megatron_ds.train_state import TrainState
from tests.problems import codes, fields
from tests.tables import tables
from tests.unit.checkpoint.fakes import run_of
from tests.unit.conversion.hf_models import VOCAB, random_model
from tests.unit.conversion.models import model, random_source
from tests.unit.tokenizer.test_tokenizers import gpt2_files

TABLES = tables(__file__)


@pytest.fixture(params=["hf", "native"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Mistral with a window of 5 tokens, and the native folder of its weights."""
    random_model("mistral-window").save_pretrained(tmp_path / "hf")
    write_weights_folder(open_hf(tmp_path / "hf"), tmp_path / "native")
    return tmp_path / str(request.param)


@pytest.mark.parametrize("prefix", [True, False])
def test_options_of_the_model_come_from_the_folder(folder: Path, prefix: bool) -> None:
    config, loaded, problems = make_plan(run_of(f"{folder.name}:{folder}" if prefix else folder))

    assert problems == []
    assert loaded.folders.load == Location(folder)
    expected = open_hf(folder.with_name("hf")).settings.model
    assert config.model == dataclasses.replace(expected, vocab_size=0)
    assert (config.model.seq_length, config.model.hidden_dropout) == (64, 0.0)
    assert config.model.window_size == "4,0"
    assert config.origins["num_layers"] == f"from {folder}"


def test_a_required_file_of_the_default_tokenizer_names_the_folder_without_one(
    folder: Path,
) -> None:
    config, _, _ = make_plan(run_of(folder))
    missing = [config.with_origin(problem) for problem in config.tokenizer.problems(None)]
    assert codes(missing) == ["tokenizer-option-required", "tokenizer-option-required"]
    assert all(f"because {folder} has no tokenizer" in str(problem) for problem in missing)


def test_given_options_are_kept_and_contradictions_name_both_values(folder: Path) -> None:
    """Claim (conversion): options of the model come from the folder, and contradictions name both
    values"""
    kept = {"seq_length": 6, "hidden_dropout": 0.2, "make_vocab_size_divisible_by": 7}
    config, _, problems = make_plan(run_of(folder, **kept))
    assert problems == []
    assert all(getattr(config.model, name) == value for name, value in kept.items())

    _, _, problems = make_plan(run_of(folder, num_layers=3, rotary_base=10000.0))
    assert sorted(codes(problems)) == ["foreign-rope-differs", "foreign-setting-differs"]
    assert sorted(fields(problems)) == [("num_layers",), ("rotary_base",)]
    (base,) = [problem for problem in problems if "rotary_base" in problem.fields]
    assert "10000.0" in str(base)
    assert "500.0" in str(base)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"rotary_base": 10000.0, "use_rope_scaling": True}, []),
        ({"position_embedding_type": "yarn", "yarn_original_max_position_embeddings": 64}, []),
        ({"rotary_interleaved": True}, ["foreign-setting-differs"]),
        ({"position_embedding_type": "alibi"}, ["foreign-setting-differs"]),
    ],
)
def test_the_rope_of_the_run_applies_if_the_run_says_so(
    folder: Path, changes: dict[str, Any], expected: list[str]
) -> None:
    run = run_of(folder, **changes)
    checkpoint = dataclasses.replace(run.checkpoint, override_rope=True)
    config, loaded, problems = make_plan(dataclasses.replace(run, checkpoint=checkpoint))
    assert codes(problems) == expected
    assert all(getattr(config.model, name) == value for name, value in changes.items())
    if not expected:
        assert list(conflicts(loaded.imported, config, VOCAB)) == []
        assert "attention.qkv" in str(
            InitialLoad.of(loaded.imported, config.with_vocab(VOCAB)).shapes
        )


@pytest.mark.parametrize(
    ("size", "expected"),
    [(VOCAB, []), (VOCAB - 20, []), (VOCAB + 1, ["foreign-vocabulary-differs"])],
)
def test_the_tokenizer_has_at_most_as_many_ids_as_the_model(
    folder: Path, size: int, expected: list[str]
) -> None:
    config, loaded, _ = make_plan(run_of(folder))
    assert codes(conflicts(loaded.imported, config, size)) == expected


def test_the_tokenizer_of_the_folder_is_used_unless_one_is_given(folder: Path) -> None:
    hf = folder.with_name("hf")
    gpt2_files(hf)
    transformers.GPT2Tokenizer.from_pretrained(hf).save_pretrained(hf)
    write_weights_folder(open_hf(hf), hf.with_name("with-tokenizer"))
    load = folder if folder == hf else hf.with_name("with-tokenizer")

    config, _, _ = make_plan(run_of(load))
    assert config.tokenizer.tokenizer_type == "HFTokenizer"
    assert Path(str(config.tokenizer.tokenizer_model)).is_relative_to(load)
    given = dataclasses.replace(
        run_of(load), tokenizer=TokenizerConfig(vocab_file="x"), given=frozenset({"vocab_file"})
    )
    assert make_plan(given)[0].tokenizer == given.tokenizer


def test_the_run_starts_at_iteration_0_with_the_weights(folder: Path) -> None:
    config, loaded, _ = make_plan(run_of(folder))
    start = InitialLoad.of(loaded.imported, config.with_vocab(VOCAB - 20))

    assert (start.state, start.optimizer_steps) == (TrainState(), None)
    assert codes(start.notes) == ["foreign-rows-unused"]
    expected = open_hf(folder.with_name("hf")).tensors
    name = "layers.1.mlp.fc_in.weight"
    assert torch.equal(start.tensor(name, "master").read(range(8, 20)), expected[name].read()[8:20])
    table = start.tensor("embedding.word.weight", "master").read(range(40))
    assert torch.equal(table[:30], expected["embedding.word.weight"].read()[:30])
    assert not table[30:].any()  # padding
    assert start.state_names(name) == ()
    complete = InitialLoad.of(loaded.imported, config.with_vocab(VOCAB))
    assert complete.notes == ()


def test_predictions_are_left_out_if_the_run_has_none(tmp_path: Path) -> None:
    write_weights_folder(random_source(model(mtp_num_layers=1)), tmp_path / "weights")
    for depths, noted in ((None, []), (0, ["foreign-predictions-left-out"])):
        given = {} if depths is None else {"mtp_num_layers": depths}
        config, loaded, problems = make_plan(run_of(tmp_path / "weights", **given))
        assert problems == []
        assert config.model.mtp_num_layers == (0 if noted else 1)
        start = InitialLoad.of(loaded.imported, config.with_vocab(50))
        assert codes(start.notes) == noted
        assert any("predictions" in name for name in start.shapes) == (not noted)


def test_damaged_folders_are_problems(folder: Path) -> None:
    _, loaded, _ = make_plan(run_of(folder))
    assert codes(check_import(loaded.imported)) == []
    content = bytearray((folder / SINGLE).read_bytes())
    content[-1] ^= 1
    (folder / SINGLE).write_bytes(content)
    damage = ["checkpoint-files-damaged"] if folder.name == "native" else []
    assert codes(check_import(loaded.imported)) == damage
    (folder / SINGLE).write_bytes(content[:-5])
    found = ["checkpoint-file-size" if damage else "foreign-file-unreadable"]
    assert codes(make_plan(run_of(folder))[2]) == found


@pytest.mark.parametrize(("load", "given", "options", "expected"), TABLES["rejected"])
def test_a_run_without_its_expected_weights_is_rejected(
    load: str,
    given: dict[str, int],
    options: dict[str, Any],
    expected: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only a plain --load next to flags of the model may have no checkpoint yet.

    One checkpoint instead of its folder is a problem of `CheckpointConfig`.
    """
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    run = run_of(load, **given).with_values(options)
    problems = make_plan(run)[2]
    assert codes(problems) == ([] if expected is None else [expected])
    assert all(load.partition(":")[2] in str(each) for each in problems)
    # The same of --pretrained-checkpoint, which is always expected.
    weights = run.with_values({"load": "new", "pretrained_checkpoint": load})
    problems = make_plan(weights)[2]
    assert fields(problems) == [("pretrained_checkpoint",)] * ("step" not in load)


def test_weights_have_no_iteration_to_choose(folder: Path) -> None:
    given: tuple[dict[str, Any], ...] = ({"ckpt_step": 3}, {"load_tag": "global_step3"})
    for step in given:
        run = run_of(f"{folder.name}:{folder}")
        problems = make_plan(run.with_values(step))[2]
        assert (codes(problems), fields(problems)) == (["ckpt-step-missing"], [(*step,)])


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
def test_a_model_of_the_hub_is_downloaded_by_one_process_at_a_time(
    weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without code, and in one of the formats of weights."""
    random_model("llama").save_pretrained(tmp_path / "cache")
    (tmp_path / "cache" / "model.safetensors").rename(tmp_path / "cache" / weights)
    wanted: list[str] = []

    def download(name: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert (name, ignore_patterns) == ("owner/model", ["*/*"])
        wanted.append(" ".join(allow_patterns))
        (lock,) = tmp_path.rglob(STAGING_LOCK)
        with lock.open() as file:
            assert not lock_now(file)
        return str(tmp_path / "cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    staging = str(tmp_path / "staging")
    cached = f"hf:{tmp_path / 'cache'}"
    assert staged_location("hf:owner/model", staging, print) == cached
    assert [".safetensors" in each for each in wanted] == [True, False][: len(wanted)]
    assert [".bin" in each for each in wanted] == [False, True][: len(wanted)]
    assert len(wanted) == 1 + weights.endswith(".bin")
    assert not any(".py" in each or "* " in each for each in wanted)

    for name in ("load", "pretrained_checkpoint"):
        options: dict[str, Any] = {name: "hf:owner/model", "checkpoint_staging_dir": staging}
        location = locate_weights(name, CheckpointConfig(**options))
        assert location == Location(tmp_path / "cache")
    (tmp_path / "owner" / "model").mkdir(parents=True)
    assert staged_location("hf:owner/model", staging, print) == "hf:owner/model"


@pytest.mark.parametrize("field", ["load", "pretrained_checkpoint"])
def test_a_model_that_cannot_be_downloaded_is_one_problem(
    field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **options: object) -> str:
        raise LocalEntryNotFoundError("no route to the host")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    monkeypatch.chdir(tmp_path)
    given: dict[str, Any] = {"checkpoint_staging_dir": "s", field: "hf:owner/model"}
    _, _, problems = make_plan(Config(checkpoint=CheckpointConfig(**given)))
    assert (codes(problems), fields(problems)) == (["model-download-failed"], [(field,)])
    assert "owner/model" in str(problems[0])
    assert "no route to the host" in str(problems[0])


def test_a_training_in_the_same_folder_is_continued(folder: Path) -> None:
    """With the options of its model, if none are given."""
    own = folder / "global_step9"
    own.mkdir()
    assert find_importable(folder, CheckpointConfig(), detect_megatron(folder)) is None
    (own / "run.json").write_text("{}")
    config, _, problems = make_plan(run_of(folder))
    assert (config.model, problems) == (ModelConfig(), [])


def test_the_model_of_a_checkpoint_of_ours_is_taken_if_no_flag_describes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = {"num_layers": 5, "seq_length": 8, "vocab_size": 70, "hidden_dropout": 0.3}
    (tmp_path / "global_step9").mkdir()
    (tmp_path / "global_step9" / "run.json").write_text(json.dumps({}))

    experts = {"num_experts": [4], "moe_router_topk": 1}
    tokenizer = {"tokenizer_type": "GPT2BPETokenizer"}
    saved_config = {"model": saved, "moe": experts, "tokenizer": tokenizer}
    found = Checkpoint(tmp_path, SimpleNamespace(config=saved_config, published={"path": "theirs"}))
    monkeypatch.setattr(plan, "select_checkpoint", lambda *args, **options: found)
    config, _, _ = make_plan(run_of(tmp_path, hidden_dropout=0.0, seq_length=16))
    assert config.model == ModelConfig(num_layers=5, seq_length=16, hidden_dropout=0.0)
    assert config.published == {"path": "theirs"}
    assert (config.moe.num_experts, config.moe.moe_router_topk) == ((4,), 1)
    config, _, _ = make_plan(run_of(tmp_path, num_layers=4))
    assert config.model == ModelConfig(num_layers=4)


def test_a_folder_cannot_make_its_tokenizer_run_code(tmp_path: Path) -> None:
    """Only the flag of the run allows it, whatever the folder says.

    Claim (checkpoints): weights to start from cannot make their tokenizer run code
    """
    random_model("llama").save_pretrained(tmp_path / "hf")
    write_weights_folder(open_hf(tmp_path / "hf"), tmp_path / "native")
    path = tmp_path / "native" / "weights.json"
    values = json.loads(path.read_text())
    stored = TokenizerConfig("HFTokenizer", tokenizer_model="somebody/code", trust_remote_code=True)
    content = json.dumps({**values, "tokenizer": dataclasses.asdict(stored)}).encode()
    path.write_bytes(content)
    files = {**read_manifest(path.parent), path.name: FileRecord.of(content)}
    (path.parent / MANIFEST).write_text(manifest_text(files))

    config, _, problems = make_plan(run_of(tmp_path / "native"))
    assert codes(problems) == ["checkpoint-tokenizer-runs-code"]
    assert not config.tokenizer.trust_remote_code
    allowed = dataclasses.replace(
        run_of(tmp_path / "native"),
        tokenizer=TokenizerConfig(trust_remote_code=True),
        given=frozenset({"trust_remote_code"}),
    )
    config, _, problems = make_plan(allowed)
    assert problems == []
    assert config.tokenizer == stored
