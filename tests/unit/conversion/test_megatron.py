"""Checkpoints of Megatron, as its programs wrote them and as an independent writer does."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from deepspeed.checkpoint import ds_to_universal

from megatron_ds.conversion.megatron.arguments import lacking_parts, model_arguments, model_settings
from megatron_ds.conversion.megatron.detect import detect_megatron
from megatron_ds.conversion.megatron.open import open_megatron
from megatron_ds.conversion.megatron.optimizer import MOMENTS
from megatron_ds.conversion.megatron.write_legacy import write_megatron
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.registry import open_source, recognize
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from megatron_ds.engine.states.state_reader import VOCABULARY_TABLES
from megatron_ds.model.attention.rule import Rope, YarnScaling, attention_rules
from tests.conftest import extracted
from tests.problems import printed_codes, raises_problem
from tests.tables import tables
from tests.unit.conversion.megatron_writer import MODULES_OF_MEGATRON, Layout, write_checkpoint
from tests.unit.conversion.models import (
    LLAMA,
    SMALL,
    assert_same_tensors,
    logits,
    model,
    random_source,
)

TABLES = tables(__file__, tuple)

STORED = ("mlm0190_gpt", "mlm08_mcore_rope_tp2", "mlm10_tp1", "mlm25_tp1", "ms_pipe_tp2")
"""Cases whose files are among the tests."""
OTHERS = TABLES["others"]
TOKENS = 300
TOLERANCE = {"mlm25_qkv_v0": 5e-3, "mlm25_release_fp16": 5e-3, "mspre_pipe_llama_bf16": 4e-2}
"""Where the peer computed its logits in half precision; 1e-5 elsewhere."""


def peer_checkpoint(shared_data: Path, case: str) -> Path:
    folder = shared_data / "peer_checkpoints" / case
    if not folder.is_dir():
        pytest.skip(f"the checkpoint {case} is not next to the checkout")
    return folder


@pytest.mark.parametrize("case", [*STORED, *OTHERS])
def test_the_model_has_the_logits_of_the_program_that_saved_it(
    case: str, megatron_checkpoints: Path, request: pytest.FixtureRequest
) -> None:
    """Claim (checkpoints): checkpoints of Megatron-LM, Megatron Core and both Megatron-DeepSpeed
    forks have the logits of the programs that wrote them"""
    folder = megatron_checkpoints / case
    if case in OTHERS:
        folder = peer_checkpoint(request.getfixturevalue("shared_data"), case)
    opened = open_megatron(folder)
    source = opened.with_vocab(TOKENS)
    reference = np.load(folder / "reference.npz")

    own = logits(source, torch.from_numpy(reference["tokens"]))

    expected = torch.from_numpy(reference["logits"])[..., :TOKENS]
    assert (own - expected).abs().max() < TOLERANCE.get(case, 1e-5)
    known = case.startswith(("ms", "bs", "mlm01"))  # others name a tokenizer of unknown size
    assert opened.settings.may_have_padding == (not known)
    assert not known or opened.settings.model.vocab_size == TOKENS


LOCAL_NAMES = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Names without Transformer Engine, by those with it."""


def test_parts_of_megatron_core_are_those_of_its_models(tmp_path: Path) -> None:
    """Claim (checkpoints): experts with biases, scores by sigmoid and shared ones, multi-latent
    attention, attention sinks, output gates and multi-token prediction of `megatron-core` have the
    logits of its models, and are written as it saved them
    """
    parts = extracted("core_parts.tar.xz", tmp_path / "parts")
    for folder in sorted(parts.iterdir()):
        source = open_megatron(folder).weights()
        reference = np.load(folder / "reference.npz")
        own = logits(source, torch.from_numpy(reference["tokens"]))
        assert np.abs(own.numpy() - reference["logits"]).max() < 1e-5, folder.name
        write_megatron(source, tmp_path / folder.name)
        path = Path("release", "mp_rank_00", "model_optim_rng.pt")
        saved, written = (
            torch.load(root / path, weights_only=False)["model"]
            for root in (folder, tmp_path / folder.name)
        )
        for name, local in LOCAL_NAMES.items():
            written = {key.replace(name, local): value for key, value in written.items()}
        assert written.keys() == saved.keys()
        for name, value in saved.items():
            rows = 60 if "embeddings" in name or "output_layer" in name else None
            assert torch.equal(written[name][:rows], value[:rows]), name


def test_iteration_and_pointer(megatron_checkpoints: Path) -> None:
    stored = megatron_checkpoints
    steps = [detect_megatron(stored / "mlm10_tp1", step) for step in (3, 4)]
    assert [step and step.path.name for step in steps] == ["iter_0000003", None]
    assert open_megatron(steps[0].path).run.iteration == 3
    assert detect_megatron(stored / "mlm10_tp1" / "iter_0000003") == steps[0]
    assert detect_megatron(stored) is None


@pytest.mark.parametrize(
    ("case", "name", "warnings"), TABLES["the_converter_recognizes_the_formats"]
)
def test_the_converter_recognizes_the_formats(
    case: str, name: str, warnings: int, megatron_checkpoints: Path
) -> None:
    found: list[str] = []
    source = open_source(megatron_checkpoints / case, options=ReadOptions(found.append))
    assert recognize(megatron_checkpoints / case).name == name
    assert printed_codes("\n".join(found)) == ["megatron-vocabulary-unknown"] * warnings
    rows = source.tensors["embedding.word.weight"].shape[0]
    assert rows == source.settings.model.vocab_size == (320 if warnings else TOKENS)
    assert source.settings.may_have_padding == bool(warnings)
    cut = source.with_vocab(TOKENS)
    assert cut.tensors["embedding.word.weight"].shape[0] == cut.settings.model.vocab_size == TOKENS
    assert not cut.settings.may_have_padding


ROPE = {"position_embedding_type": "rope"}
CASES = {
    name: (model, Layout(**layout)) for name, (model, layout) in TABLES["cases_of_layouts"].items()
}


@pytest.mark.parametrize("name", CASES)
def test_every_layout_gives_the_same_tensors(name: str, tmp_path: Path) -> None:
    """Claim (checkpoints): tensor- and pipeline-parallel sizes, virtual stages, versions and
    spellings of Megatron's files give the same tensors"""
    changes, layout = CASES[name]
    folder, written = write(tmp_path, layout, **changes)

    read = open_megatron(folder).weights()
    if layout.files.startswith("neox"):  # does not tell the size of the vocabulary
        read = read.with_vocab(written.settings.model.vocab_size)

    assert_same_tensors(read, written)
    assert read.settings.fixed == written.settings.fixed


OPTIMIZER_CASES = {
    name: (model, Layout(**layout))
    for name, (model, layout) in TABLES["cases_of_optimizers"].items()
}


@pytest.mark.parametrize("name", OPTIMIZER_CASES)
def test_states_of_the_optimizer_are_those_of_their_weights(name: str, tmp_path: Path) -> None:
    """Claim (checkpoints): optimizer states of Megatron's files, its distributed optimizer, ZeRO 1
    to 3, DeepSpeed's pipeline and universal checkpoints of the forks belong to their weights"""
    changes, layout = OPTIMIZER_CASES[name]
    config = model(**changes)
    kinds = ("exp_avg", "exp_avg_sq", *(("fp32_param",) if layout.half else ()))
    written = {kind: random_source(config, seed=seed) for seed, kind in enumerate(kinds, 2)}
    weights = random_source(config)
    if layout.buffers:  # whose places are known by the weights in them
        written["fp32_param"] = weights
    write_checkpoint(tmp_path, config, weights, layout, written)

    read = open_megatron(tmp_path)

    assert (read.run.iteration, read.run.steps, read.unread) == (7, 6, "")
    if not layout.files.startswith("neox"):  # does not save them
        assert (read.run.consumed_samples, read.run.applied_samples) == (28, 24)
    assert read.optimizer.keys() - {"master"} == {*MOMENTS}
    is_universal = layout.files.startswith("universal")
    for kind, expected in written.items():
        if is_universal and kind == "fp32_param":
            continue  # the weights are those
        own = read.optimizer["master" if kind == "fp32_param" else kind]
        for key, tensor in expected.tensors.items():
            value = tensor.read()
            rows = len(value) if key in VOCABULARY_TABLES else None
            assert torch.equal(own[key].read()[:rows], value), (kind, key)


@pytest.mark.parametrize("case", ["bs_pipe_z1", "ms_nopipe_z1", "ms_pipe_tp2"])
def test_master_weights_of_deepspeed_are_the_weights(case: str, shared_data: Path) -> None:
    model = open_megatron(peer_checkpoint(shared_data, case))
    assert model.optimizer["master"].keys() == model.tensors.keys()
    for name, tensor in model.tensors.items():
        assert torch.equal(model.optimizer["master"][name].read(), tensor.read()), name


@contextmanager
def changed(path: Path) -> Iterator[Any]:
    """The contents of a file, which are saved with the changes of the block."""
    content = torch.load(path, weights_only=False)
    yield content
    torch.save(content, path)


@pytest.mark.parametrize("files", ["legacy", "torch_dist", "deepspeed", "zero3", "universal"])
def test_a_decay_in_the_gradient_is_mentioned(files: str, tmp_path: Path) -> None:
    """torch.optim.Adam, which microsoft's fork uses on other devices than CUDA's."""
    config = model(**LLAMA)
    source = random_source(model(**LLAMA))
    layout = Layout(files=files, half=files not in ("legacy", "torch_dist"))
    moments = dict.fromkeys((*MOMENTS, "fp32_param") if layout.half else MOMENTS, source)
    folder = write_checkpoint(tmp_path, config, source, layout, moments)
    found = detect_megatron(folder)
    names = {"legacy": "mp_rank_00/model_optim_rng.pt", "torch_dist": "common.pt"}
    names["universal"] = "zero/optimizer_state.pt"
    name = names.get(files, "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    for decay in (0.0, 0.1):
        with changed(found.path / name) as content:
            inner = content.get("optimizer_state_dict", content)
            inner = inner.get("base_optimizer_state", inner)
            inner = inner.get("optimizer", inner.get("optimizer_state_dict", inner))
            for group in inner.get("optimizer", inner)["param_groups"]:
                group.update(decoupled_weight_decay=False, weight_decay=decay)
        notes = [note.code for note in open_megatron(found.path).notes]
        assert notes == (["foreign-decay-coupled"] if decay else [])


def test_rows_in_an_unknown_order_are_rejected(tmp_path: Path) -> None:
    config = model(**LLAMA)
    layout = Layout(
        files="universal", tp=2, thirds=True, arguments={"tensor_model_parallel_size": None}
    )
    moments = {kind: random_source(config, seed=2) for kind in MOMENTS}
    folder = write_checkpoint(tmp_path, config, random_source(config), layout, moments)
    with raises_problem("universal-rows-ambiguous", contains="query_key_value"):
        open_megatron(folder).weights()
    # Parts of rows that are grouped by head contradict the arguments.
    path = next(folder.glob("*/zero/*layers.0.self_attention.query_key_value.weight/fp32.pt"))
    with changed(path) as content:
        content["param_n_sub_params"] = 3
    with changed(path.parents[2] / "mp_rank_00_model_states.pt") as state:
        del state["args"].ds_sequence_parallel_fpdt
        state["args"].tensor_model_parallel_size = 2
    with raises_problem("universal-rows-ambiguous", contains="query_key_value"):
        open_megatron(folder).weights()


def test_buffers_with_other_weights_are_not_read(tmp_path: Path) -> None:
    config = model()
    layout = Layout(half=True, buffers="coalesced")
    written = {kind: random_source(config, seed=2) for kind in (*MOMENTS, "fp32_param")}
    write_checkpoint(tmp_path, config, random_source(config), layout, written)
    read = open_megatron(tmp_path)
    assert (read.optimizer, read.run.steps) == ({}, None)
    assert "distributed optimizer" in read.unread


def test_deepspeeds_converter_and_this_program_read_the_same(
    shared_data: Path, tmp_path: Path
) -> None:
    """A fork's checkpoint with two tensor-parallel ranks, converted by DeepSpeed's own code.

    Claim (checkpoints): a universal checkpoint that DeepSpeed converts from a fork's is read like
    the fork's itself
    """
    case = peer_checkpoint(shared_data, "ms_pipe_tp2")
    folder = tmp_path / "run"
    for path in filter(Path.is_file, case.rglob("*")):  # without the permissions of the original
        (folder / path.relative_to(case)).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, folder / path.relative_to(case))
    direct = detect_megatron(folder)
    options: dict[str, Any] = {"num_extract_workers": 1, "num_merge_workers": 1, "strict": True}
    options |= {"keep_temp_folder": False, "inject_missing_state": False}
    output = f"{direct.path}_universal"
    with patch.dict(sys.modules, MODULES_OF_MEGATRON):
        ds_to_universal.main(
            argparse.Namespace(input_folder=str(direct.path), output_folder=output, **options)
        )
    assert detect_megatron(folder) == direct
    found = detect_megatron(folder, universal=True)
    assert found.path == Path(output)
    own = open_megatron(found.path)
    expected = open_megatron(direct.path)
    assert own.run == expected.run
    assert own.settings.model.vocab_size == expected.settings.model.vocab_size
    assert own.optimizer.keys() == expected.optimizer.keys()
    for kind, tensors in {"weights": expected.tensors, **expected.optimizer}.items():
        read = own.tensors if kind == "weights" else own.optimizer[kind]
        assert read.keys() == tensors.keys()
        for name, tensor in tensors.items():
            rows = TOKENS if name == "embedding.word.weight" else None
            assert torch.equal(read[name].read(), tensor.read()[:rows]), (kind, name)
    assert open_source(Path(output)).format == "universal"
    assert recognize(folder).name == "megatron"


def test_partitioned_states_are_not_read(tmp_path: Path) -> None:
    folder, _ = write(tmp_path)
    with changed(folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt") as state:
        state["optimizer"] = {"optimizer": {"param_groups": [{"step": 7, "params": [0]}]}}
    read = open_megatron(folder)
    assert not read.optimizer
    assert "distributed optimizer" in read.unread


def write(
    folder: Path, layout: Layout | None = None, **changes: Any
) -> tuple[Path, SourceCheckpoint]:
    source = random_source(model(**changes))
    return write_checkpoint(folder, model(**changes), source, layout or Layout()), source


@pytest.mark.parametrize(("argument", "value"), TABLES["parts_that_the_model_lacks"])
def test_a_part_that_the_model_lacks_is_named(argument: str, value: Any, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(arguments={argument: value}))
    shown = value if isinstance(value, str) else argument
    with raises_problem("megatron-part-unsupported", contains=shown):
        open_megatron(folder).weights()


@pytest.mark.parametrize(("changes", "read"), TABLES["rotary_positions"])
def test_rotary_positions_are_written_and_read(
    changes: dict[str, Any], read: dict[str, Any]
) -> None:
    config = model(**changes)
    assert list(lacking_parts(config)) == []
    fields = model_settings(model_arguments(config), Path())
    found = ModelSettings({**SMALL, **fields}).model
    expected = {**changes, **read}
    assert {name: getattr(found, name) for name in expected} == expected
    assert attention_rules(found) == attention_rules(config)


def test_yarn_of_a_model_that_its_program_configures_is_read() -> None:
    arguments = {
        "num_layers": 1, "hidden_size": 32, "num_attention_heads": 4, "seq_length": 12,
        "position_embedding_type": "yarn", "rotary_scaling_factor": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.0, "yarn_rotary_scaling_factor": 32.0, "yarn_mscale": None,
        "yarn_original_max_position_embeddings": 4096, "yarn_beta_fast": 32.0,
        "yarn_correction_range_round_to_int": False, "rotary_base": 150000,
    }  # fmt: skip
    fields = model_settings(arguments, Path())
    (rule,) = attention_rules(ModelSettings({**fields, "vocab_size": 9}).model)
    assert rule.rope == Rope(150000.0, 8, scaling=YarnScaling(32.0, 4096, is_rounded=False))


def test_arguments_that_are_off_are_no_parts(tmp_path: Path) -> None:
    off = {"num_experts": [1], "softmax_type": "vanilla", "rotary_seq_len_interpolation_factor": 1}
    folder, _ = write(tmp_path, Layout(arguments=off))
    open_megatron(folder).weights()


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("args.num_layers", "x", "megatron-layers-missing"),
        ("args.num_layers", 10**8, "megatron-layers-missing"),
        ("args.hidden_size", True, "foreign-file-unreadable"),
        ("args.num_attention_heads", 3, "foreign-file-unreadable"),
        ("args.kv_channels", 10**9, "foreign-file-unreadable"),
        ("iteration", "x", "foreign-file-unreadable"),
        ("checkpoint_info", 5, "foreign-file-unreadable"),
        ("opt_param_scheduler", 5, "foreign-file-unreadable"),
        ("model", 5, "megatron-layers-missing"),
        ("model0", {"weight": torch.ones(1).expand(2**45)}, "foreign-file-unreadable"),
    ],
)
def test_malformed_states_are_rejected(key: str, value: Any, code: str, tmp_path: Path) -> None:
    folder, _ = write(tmp_path)
    with changed(folder / "iter_0000007" / "mp_rank_00" / "model_optim_rng.pt") as state:
        if key == "model0":
            state["model0"] = {**value, "language_model": state.pop("model")["language_model"]}
        elif key.startswith("args."):
            setattr(state["args"], key.removeprefix("args."), value)
        else:
            state[key] = value
    with raises_problem(code, contains=str(folder)):
        open_megatron(folder).weights()


def test_malformed_states_of_the_optimizer_are_rejected(tmp_path: Path) -> None:
    """When they are read."""
    config = model()
    source = random_source(model())
    moments = dict.fromkeys((*MOMENTS, "fp32_param"), source)
    layout = Layout(files="deepspeed", half=True, dp=2)
    folder = write_checkpoint(tmp_path, config, source, layout, moments)
    path = folder / "global_step7" / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with changed(path) as state:
        state["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"] = "x"
    tensors = open_megatron(folder).optimizer["exp_avg"].values()
    with raises_problem("foreign-file-unreadable", contains=str(path.parent)):
        for tensor in tensors:
            tensor.read()


def test_an_unknown_weight_is_named(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(extra="layers.0.adapter.weight"))
    with raises_problem("megatron-weights-unknown", contains="layers.0.adapter.weight"):
        open_megatron(folder).weights()


def test_an_unknown_version_is_rejected(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(version=4))
    with raises_problem("megatron-version-unknown", contains="4"):
        open_megatron(folder).weights()


@pytest.mark.parametrize(("files", "missing"), TABLES["missing_files_are_named"])
def test_missing_files_are_named(files: str, missing: str, tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(files=files, tp=2, pp=2))
    found = detect_megatron(folder)
    path = found.path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    code = "dcp-metadata-missing" if files == "torch_dist" else "megatron-files-missing"
    with raises_problem(code, contains=missing):
        open_megatron(folder).weights()


def test_a_missing_last_stage_is_noticed(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(tp=1, pp=2))
    shutil.rmtree(folder / "iter_0000007" / "mp_rank_00_001")
    with raises_problem("megatron-layers-missing", contains="2 layers"):
        open_megatron(folder).weights()


def test_another_backend_is_rejected(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(files="torch_dist"))
    path = folder / "iter_0000007" / "metadata.json"
    path.write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    with raises_problem("dcp-backend-unsupported", contains="zarr"):
        open_megatron(folder).weights()


def test_without_arguments_the_settings_are_given(tmp_path: Path) -> None:
    folder, written = write(tmp_path, Layout(version=0, names="old", arguments=None))
    found = detect_megatron(folder)
    with raises_problem("megatron-without-arguments", contains=str(found.path)):
        open_megatron(found.path)
    options = ReadOptions(model={"num_attention_heads": 4, "hidden_size": 32})
    source = open_megatron(found.path, options)
    for key, tensor in written.tensors.items():
        assert torch.equal(source.tensors[key].read()[: len(tensor.read())], tensor.read()), key


@pytest.mark.parametrize(
    ("arguments", "activation", "approximation"), TABLES["the_kind_of_gelu_follows_from_the_kernel"]
)
def test_the_kind_of_gelu_follows_from_the_kernel(
    arguments: dict[str, Any], activation: str, approximation: str | None, tmp_path: Path
) -> None:
    folder, _ = write(tmp_path, Layout(arguments=arguments))
    fixed = open_megatron(folder).weights().settings.fixed
    assert (fixed["activation"], fixed.get("gelu_approximation")) == (activation, approximation)


def test_wrong_rotations_of_a_version_are_mentioned(tmp_path: Path) -> None:
    arguments = {"sequence_parallel": False}
    layout = Layout(files="deepspeed", thirds=True, arguments=arguments)
    folder, _ = write(tmp_path, layout, **LLAMA)
    found = detect_megatron(folder)
    assert [note.code for note in open_megatron(found.path).notes] == [
        "megatron-deepspeed-wrong-rope"
    ]


def test_a_checkpoint_of_this_program_is_not_taken_for_one_of_megatron(tmp_path: Path) -> None:
    folder = tmp_path / "global_step3"
    folder.mkdir()
    (folder / "mp_rank_00_model_states.pt").touch()
    (tmp_path / "latest").write_text("global_step3")
    assert detect_megatron(tmp_path) is not None
    (folder / "run.json").touch()
    assert detect_megatron(tmp_path) is None


@pytest.mark.parametrize(
    ("setting", "value"),
    [("gpt_j_tied", True), ("pos-emb", "rpe"), ("norm", "scalenorm"), ("activation", "geglu")],
)
def test_a_part_of_neox_that_the_model_lacks_is_named(
    setting: str, value: Any, tmp_path: Path
) -> None:
    folder, _ = write(tmp_path, Layout(files="neox pipeline"))
    path = folder / "global_step7" / "configs" / "model.yml"
    path.write_text(json.dumps({**json.loads(path.read_text()), setting: value}))
    shown = setting if value is True else str(value)
    with raises_problem("megatron-part-unsupported", contains=shown):
        open_megatron(folder).weights()


def test_neox_has_a_name_of_its_own(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(files="neox pipeline"))
    named = open_source(folder, "megatron")
    recognized = open_source(folder)
    assert (named.format, recognized.format) == ("megatron-deepspeed", "neox")
    assert open_source(folder, "neox").format == "neox"
    assert named.settings == recognized.settings
    for name, tensor in recognized.tensors.items():
        assert torch.equal(named.tensors[name].read(), tensor.read())


def test_neox_without_its_settings_needs_the_flags(tmp_path: Path) -> None:
    folder, _ = write(tmp_path, Layout(files="neox pipeline"))
    shutil.rmtree(folder / "global_step7" / "configs")
    with raises_problem("megatron-without-arguments"):
        open_megatron(folder).weights()
