"""Models of transformers: read, written, and rejected where they need more than ours has."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

from megatron_ds.config import ModelConfig, TokenizerConfig
from megatron_ds.conversion import json_files
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, layer_types
from megatron_ds.conversion.huggingface.read_write import (
    GENERATION,
    PICKLED,
    PICKLED_INDEX,
    open_hf,
    write_hf,
)
from megatron_ds.conversion.huggingface.rope_parameters import RopeKeys
from megatron_ds.conversion.huggingface.rope_rows import rope
from megatron_ds.conversion.safetensors_files import INDEX, SINGLE
from megatron_ds.conversion.source import SourceCheckpoint, WriteOptions
from megatron_ds.conversion.weights_folder import open_weights_folder, write_weights_folder
from megatron_ds.conversion.weights_locations import HF_CONFIG, SETTINGS, is_hf
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.inference.generate import generate
from megatron_ds.inference.generation.sampling_params import SamplingParams
from megatron_ds.inference.generation.sequences import GenerationConfig
from megatron_ds.inference.load_checkpoint import load_model
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.position_embedding import rope_rates
from megatron_ds.parallel.mesh import Mesh
from tests.problems import raises_problem
from tests.proofs.cases import with_proofs
from tests.tables import tables
from tests.unit.checkpoint.test_full_weights import Trap
from tests.unit.conversion.hf_models import (
    LLAMA3,
    MODELS,
    PROMPTS,
    TOKENS,
    VOCAB,
    YARN,
    greedy_ids,
    load_strictly,
    logits_of,
    random_model,
)
from tests.unit.conversion.models import SMALL, assert_same_tensors, logits, random_source
from tests.unit.conversion.test_weights_folder import write_settings
from tests.unit.tokenizer.test_tokenizers import END, gpt2_files

TABLES = tables(__file__)

LLAMA_LIKE = TABLES["llama_like"]
SIMILAR = (
    "gpt2-relu2",
    "llama-linear",
    "llama-dynamic",
    "mistral-window",
    "qwen2-window",
    "qwen3",
    "qwen2-yarn",
    "qwen3-yarn",
    "smollm3-pattern",
    "qwen3-moe-layers",
    "deepseek-v3-yarn",
    "glm4-moe-biases",
    "pythia",
    "bloom-norms",
    "phi-norms",
    "falcon-heads",
)
"""Further models of families, whose parts other ones have, too, or `test_hf_config.py` compares."""


def saved(folder: Path, name: str = "llama", **options: Any) -> Path:
    random_model(name).save_pretrained(folder, **options)
    return folder


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / HF_CONFIG).read_text()) | values
    present = {key: value for key, value in config.items() if value is not ...}
    (folder / HF_CONFIG).write_text(json.dumps(present))


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def assert_same_files(found: Path, expected: Path) -> None:
    """The same tensors under the same names, byte by byte."""
    ours = tensors_in(found)
    theirs = tensors_in(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == value.dtype
        assert torch.equal(ours[name].view(torch.uint8), value.view(torch.uint8)), name


@pytest.mark.parametrize("name", with_proofs(MODELS, SIMILAR))
def test_each_family_is_read_and_written(tmp_path: Path, name: str) -> None:
    """Equal logits to 1e-5 of the largest, equal texts, and the same files after both ways.

    Claim (conversion): a model of each Hugging Face family gives the logits of `transformers` here,
    and its tensors come back byte by byte into a folder that `from_pretrained` loads without a
    missing or unexpected weight; its greedy text, of one prompt and of a batch of prompts of
    several lengths, is that of `generate` of `transformers`
    """
    model = random_model(name)
    model.save_pretrained(tmp_path / "theirs")
    expected = logits_of(model)

    source = open_hf(tmp_path / "theirs")
    write_weights_folder(source, tmp_path / "ours")
    again = open_weights_folder(tmp_path / "ours")
    write_hf(again, tmp_path / "again", WriteOptions(shard_bytes=10_000))

    ours = load_model(source, Mesh.single(), torch.device("cpu"))
    assert (ours(TOKENS)[..., :VOCAB] - expected).abs().max() / expected.abs().max() < 1e-5
    texts = [greedy_ids(model, prompt, 12) for prompt in PROMPTS]
    greedy = GenerationConfig(12, SamplingParams(greedy=True))
    assert generate(ours, PROMPTS, greedy) == texts
    assert generate(ours, PROMPTS[:1], greedy) == texts[:1]
    assert_same_files(tmp_path / "again", tmp_path / "theirs")
    loaded = load_strictly(tmp_path / "again")
    assert torch.equal(logits_of(loaded), expected)
    assert loaded.config.model_type == model.config.model_type
    assert (loaded.config.bos_token_id, loaded.config.eos_token_id) == (0, 1)
    assert loaded.generation_config.eos_token_id == 1


@pytest.mark.parametrize(
    "name",
    [
        "mixtral",
        "qwen3-moe",
        "qwen3-moe-layers",
        "glm4-moe",
        "gpt-oss",
        "gpt-oss-types",
        "deepseek-v3",
        "phi3",
        "gemma3",
        "olmo3",
    ],
)
def test_gradients_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Written to files like weights, so that they have the same names."""
    theirs = random_model(name)
    theirs.save_pretrained(tmp_path / "weights")
    source = open_hf(tmp_path / "weights")
    ours = load_model(source, Mesh.single(), torch.device("cpu")).requires_grad_()
    for model, logits_BSV in ((theirs, theirs(TOKENS).logits), (ours, ours(TOKENS))):
        logits_BSV[..., :VOCAB].square().mean().backward()
        for parameter in model.parameters():
            parameter.data = parameter.grad
    theirs.save_pretrained(tmp_path / "theirs")
    named = (*ours.named_parameters(), *ours.named_buffers())
    tensors = {key: TensorReader.of(value.detach()) for key, value in named}
    gradients = SourceCheckpoint(tmp_path, "native", source.settings, tensors)
    write_hf(gradients, tmp_path / "ours")
    found = tensors_in(tmp_path / "ours")
    expected = tensors_in(tmp_path / "theirs")
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        rows = found[key][: len(value)]
        assert (rows - value).abs().max() <= 1e-4 * value.abs().max(), key


def test_settings_of_generation_are_kept(tmp_path: Path) -> None:
    model = random_model("llama")
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.9, eos_token_id=[1, 2])
    model.save_pretrained(tmp_path / "theirs")
    write_weights_folder(open_hf(tmp_path / "theirs"), tmp_path / "ours")
    write_hf(open_weights_folder(tmp_path / "ours"), tmp_path / "again")
    generation = load_strictly(tmp_path / "again").generation_config
    found = generation.to_dict()
    expected = model.generation_config.to_dict()
    assert found.pop("_from_model_config") != expected.pop("_from_model_config")
    assert found == expected


@pytest.mark.parametrize(("ids", "generation"), TABLES["special_ids"])
def test_special_ids_stay_in_their_file(
    tmp_path: Path, ids: dict[str, Any], generation: dict[str, Any]
) -> None:
    """An id that is absent is not written: its class has a default."""
    theirs = saved(tmp_path / "theirs")
    absent = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), ...)
    change_config(theirs, **{**absent, **ids})
    (theirs / GENERATION).write_text(json.dumps(generation))
    write_weights_folder(open_hf(theirs), tmp_path / "ours")
    source = open_weights_folder(tmp_path / "ours")
    write_hf(source, tmp_path / "again")
    config = json.loads((tmp_path / "again" / HF_CONFIG).read_text())
    assert {key: config[key] for key in absent if key in config} == ids
    loaded = [load_strictly(tmp_path / each) for each in ("theirs", "again")]
    expected, found = (model.generation_config.to_dict() for model in loaded)
    assert {**found, "_from_model_config": None} == {**expected, "_from_model_config": None}
    write_hf(source, tmp_path / "other", WriteOptions(hf_model_type="mistral"))
    other = load_strictly(tmp_path / "other").config
    assert other.eos_token_id == ids.get("eos_token_id")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_kept(tmp_path: Path, dtype: torch.dtype) -> None:
    random_model("llama").to(dtype).save_pretrained(tmp_path / "theirs")
    write_hf(open_hf(tmp_path / "theirs"), tmp_path / "again")
    assert_same_files(tmp_path / "again", tmp_path / "theirs")
    assert load_strictly(tmp_path / "again", dtype="auto").dtype == dtype


def test_files_of_older_versions_are_read(tmp_path: Path) -> None:
    """Pickled shards with an index; names without prefix; buffers; the keys of version 4."""
    saved(tmp_path / "new", "gpt-neox")
    saved(tmp_path / "old", "gpt-neox")
    tensors = {k.removeprefix("gpt_neox."): v for k, v in tensors_in(tmp_path / "old").items()}
    (tmp_path / "old" / SINGLE).unlink()
    tensors["layers.0.attention.bias"] = torch.ones(1, 1, 12, 12, dtype=torch.uint8)
    tensors["layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    names = {name: f"part-{index % 2}.bin" for index, name in enumerate(tensors)}
    for file in set(names.values()):
        part = {name: tensors[name].clone() for name in tensors if names[name] == file}
        torch.save(part, tmp_path / "old" / file, _use_new_zipfile_serialization=file[5] == "0")
    (tmp_path / "old" / PICKLED_INDEX).write_text(json.dumps({"weight_map": names}))
    change_config(
        tmp_path / "old",
        rope_parameters=...,
        rotary_emb_base=500,
        rotary_pct=0.5,
        attention_bias=...,
        hidden_act=...,
    )

    assert_same_tensors(open_hf(tmp_path / "old"), open_hf(tmp_path / "new"))
    old, new = (
        dataclasses.replace(open_hf(tmp_path / name).settings, published={})
        for name in ("old", "new")
    )
    assert old == new


ROTATIONS: tuple[dict[str, Any], ...] = TABLES["rotations"]


@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral", "falcon", "gpt-neox"])
def test_rotations_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    """Of keys in several places, and of a fraction that most families ignore."""
    saved(tmp_path, name)
    absent = {key: ... for keys in ROTATIONS for key in keys}
    for keys in ROTATIONS:
        change_config(tmp_path, **{**absent, **keys})
        expected = logits_of(load_strictly(tmp_path))
        found = logits(open_hf(tmp_path), TOKENS)
        assert (found - expected).abs().max() / expected.abs().max() < 1e-5, keys


def test_the_files_that_transformers_reads_are_read(tmp_path: Path) -> None:
    """One file, although the index and the files of an older save are there, too."""
    saved(tmp_path, max_shard_size="10KB")
    save_file({name: 2 * value for name, value in tensors_in(tmp_path).items()}, tmp_path / SINGLE)
    assert (tmp_path / INDEX).is_file()
    expected = logits_of(load_strictly(tmp_path))
    found = logits(open_hf(tmp_path), TOKENS)
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5


def test_a_tied_table_has_either_name_or_both(tmp_path: Path) -> None:
    expected = open_hf(saved(tmp_path / "original", "qwen2"))
    table = "model.embed_tokens.weight"
    folder = saved(tmp_path / "changed", "qwen2")
    tensors = tensors_in(folder)
    embedding = tensors[table]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, folder / SINGLE)
    assert_same_tensors(open_hf(folder), expected)
    for other in (2 * embedding, embedding.double(), embedding[:-1].clone()):
        save_file({**tensors, "lm_head.weight": other}, folder / SINGLE)
        with raises_problem("hf-tied-weights-differ", contains="lm_head"):
            open_hf(folder)
    del tensors[table]
    save_file({**tensors, "lm_head.weight": embedding}, folder / SINGLE)
    assert_same_tensors(open_hf(folder), expected)
    logits_of(load_strictly(folder))


def test_tensors_that_become_one_may_have_several_types(tmp_path: Path) -> None:
    """The type of the result has the values of all."""
    saved(tmp_path / "theirs")
    tensors = tensors_in(tmp_path / "theirs")
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"]
    tensors[names[0]] = tensors[names[0]].bfloat16()
    tensors[names[1]] = tensors[names[1]].half()
    save_file(tensors, tmp_path / "theirs" / SINGLE)
    write_hf(open_hf(tmp_path / "theirs"), tmp_path / "again")
    found = tensors_in(tmp_path / "again")
    for name, value in tensors.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], value.float()), name


def test_integers_are_no_weights(tmp_path: Path) -> None:
    change_config(saved(tmp_path), quantization_config=None)
    open_hf(tmp_path)
    tensors = {name: value.to(torch.int8) for name, value in tensors_in(tmp_path).items()}
    save_file(tensors, tmp_path / SINGLE)
    with raises_problem("weights-type-unsupported", contains="int8"):
        open_hf(tmp_path)


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    """Those of every class with which a file of the Hub may be incomplete.

    Claim (conversion): absent keys of a `config.json` have the defaults of `transformers`
    """
    from megatron_ds.conversion.huggingface.config_rows import ConfigValues
    from megatron_ds.conversion.huggingface.families import FAMILIES

    required = {
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "n_layer",
        "n_head",
        "intermediate_size",
        "max_position_embeddings",
        "num_key_value_heads",
    }
    for name, family in FAMILIES.items():
        values = transformers.AutoConfig.for_model(name).to_dict()
        sparse = {key: value for key, value in values.items() if key in required}
        fields = []
        for config in (ConfigValues(Path(), sparse), ConfigValues(Path(), values)):
            read: dict[str, Any] = {}
            for row in family.rows:
                read |= row.read(config)
            read.pop("seq_length")
            # A null head size is the quotient.
            fields.append({k: v for k, v in read.items() if k != "kv_channels"})
        if name == "falcon":
            fields[1].pop("ffn_hidden_size")  # derived by the class
        assert fields[0] == fields[1], name


GEMMA3 = {
    **dict.fromkeys(("hidden_size", "head_dim", "intermediate_size"), 32),
    "num_hidden_layers": 4,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ],
)
def test_layers_with_a_window_have_a_base_of_their_own(changes: dict[str, Any]) -> None:
    """In keys of versions before 5 of transformers, and in those that version 5 writes."""
    keys = RopeKeys(theta=1e6, window_theta=("rope_local_base_freq", 1e4))
    row = rope(keys, functools.partial(layer_types, every=6))
    theirs = transformers.Gemma3TextConfig(**GEMMA3, **changes)
    rotary = Gemma3RotaryEmbedding(theirs)
    sizes = {"num_layers": 4, "hidden_size": 32, "num_attention_heads": 1, "seq_length": 8}
    sizes |= {"window_size": "5,0", "window_attn_skip_freq": "2"}
    for values in ({**GEMMA3, **changes}, theirs.to_dict()):
        config = ConfigValues(Path(), values)
        model = ModelConfig(**sizes, **row.read(config))
        assert config.lacking == []
        assert list(model.rope_problems()) == []
        for kind, rule in zip(GEMMA3["layer_types"], attention_rules(model), strict=True):
            expected = getattr(rotary, f"{kind}_inv_freq")
            assert torch.allclose(rope_rates(rule.rope, torch.device("cpu")), expected, rtol=1e-6)
        written = {**GEMMA3, **row.write(model)}
        assert row.read(ConfigValues(Path(), written)) == row.read(config)


@pytest.mark.parametrize(
    ("name", "change", "part"),
    [
        ("gpt-neox", {"attention_bias": False}, "attention_bias"),
        ("llama3", {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}}, "low_freq_factor: 2.0"),
        ("llama", {"rope_parameters": ..., "rope_scaling": {"type": "longrope"}}, "longrope"),
        ("llama", {"rope_parameters": None, "rope_scaling": {"type": "longrope"}}, "longrope"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "full_attention"),
        ("qwen2-yarn", {"rope_parameters": {**YARN, "attention_factor": 0.5}}, "attention_factor"),
        ("llama", {"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        ("llama", {"hidden_act": "mish"}, "mish"),
        ("llama", {"sliding_window": 5}, "sliding_window: 5"),
        ("mistral", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"model_type": "olmo"}, "LayerNorm without weights"),
        ("llama", {"model_type": "qwen3_next"}, "linear attention"),
        ("gpt-oss", {"swiglu_alpha": 1.5}, "swiglu_alpha: 1.5"),
        ("phi3", {"rope_parameters": {"type": "yarn", "factor": 2.0}}, "LongRoPE"),
        ("qwen2", {"use_sliding_window": 1}, "use_sliding_window"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok"),
        ("qwen3-moe", {"mlp_only_layers": [0]}, "mlp_only_layers"),
        ("glm4-moe", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("glm4-moe", {"topk_group": 1}, "topk_group"),
        ("glm4-moe", {"n_shared_experts": 0}, "n_shared_experts"),
        ("qwen2", {"layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("falcon", {"new_decoder_architecture": True}, "new_decoder_architecture"),
        ("falcon", {"alibi": True}, "alibi"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "inverse_layer_idx"),
    ],
)
def test_parts_that_the_model_lacks_are_named(
    tmp_path: Path, name: str, change: dict[str, Any], part: str
) -> None:
    """Claim (conversion): parts that the model lacks are named"""
    change_config(saved(tmp_path, name), **change)
    with raises_problem("hf-parts-lacking", contains=part):
        open_hf(tmp_path)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"model_type": "t5"}, "hf-model-type"),
        ({"model_type": ...}, "hf-model-type"),
        ({"num_hidden_layers": ...}, "hf-config-key-missing"),
        ({"num_hidden_layers": "many"}, "hf-config-value"),
        ({"num_hidden_layers": 2.5}, "hf-config-value"),
        ({"num_hidden_layers": float("inf")}, "hf-config-value"),
        ({"vocab_size": VOCAB - 1}, "weights-shape-mismatch"),
        ({"rope_parameters": 5}, "hf-config-value"),
        ({"rope_parameters": {"rope_theta": 0}}, "hf-config-value"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "hf-config-value"),
        ({"rope_parameters": {"rope_theta": float("inf")}}, "hf-config-value"),
        ({"rms_norm_eps": None}, "hf-config-value"),
        ({"num_hidden_layers": 10**9}, "hf-config-value"),
        ({"num_attention_heads": 5}, "foreign-file-unreadable"),
        ({"num_hidden_layers": 3}, "hf-tensors-missing"),
        ({"num_hidden_layers": 1}, "hf-tensors-unknown"),
        ({"intermediate_size": 44}, "weights-shape-mismatch"),
    ],
)
def test_wrong_configurations_are_rejected(
    tmp_path: Path, change: dict[str, Any], code: str
) -> None:
    change_config(saved(tmp_path), **change)
    with raises_problem(code):
        open_hf(tmp_path)


def test_weights_that_are_not_finite_are_rejected(tmp_path: Path) -> None:
    """As in a checkpoint of a run, when they are read; names of tensors are those of the file."""
    tensors = tensors_in(saved(tmp_path / "theirs"))
    name = "model.layers.1.mlp.up_proj.weight"
    for number, value in enumerate((float("nan"), float("-inf"), 1e30)):
        changed = {**tensors, name: tensors[name].index_fill(0, torch.tensor([3]), value)}
        save_file(changed, tmp_path / "theirs" / SINGLE)
        with raises_problem("foreign-weights-not-finite", contains=name):
            write_weights_folder(open_hf(tmp_path / "theirs"), tmp_path / str(number))
        assert not (tmp_path / str(number)).exists()


def test_a_configuration_is_a_file_of_limited_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a pipe, which waits indefinitely, nor a device without an end is read."""
    file = saved(tmp_path) / HF_CONFIG
    content = file.read_text()
    deep = "[" * 100_000
    for text, part in ((deep, "nested"), (content[:-3], "Expecting")):
        file.write_text(text)
        with raises_problem("foreign-file-unreadable", contains=part):
            open_hf(tmp_path)
        assert not is_hf(tmp_path)
    file.write_text(content)
    monkeypatch.setattr(json_files, "LARGEST_FILE", 100)
    with raises_problem("foreign-file-unreadable", contains="more than 100 bytes"):
        open_hf(tmp_path)
    file.unlink()
    file.symlink_to("/dev/zero")
    assert not is_hf(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert not is_hf(tmp_path)
    with raises_problem("hf-folder-without-config"):
        open_hf(tmp_path)


def test_the_index_decides_which_file_has_a_tensor(tmp_path: Path) -> None:
    tensors = tensors_in(saved(tmp_path))
    expected = {name: tensor.read() for name, tensor in open_hf(tmp_path).tensors.items()}
    (tmp_path / SINGLE).rename(tmp_path / "a.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, tmp_path / "b.safetensors")
    places = dict.fromkeys(tensors, "a.safetensors")
    doubled = "model.norm.weight"
    places[doubled] = "b.safetensors"
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    found = open_hf(tmp_path).tensors
    for name, tensor in expected.items():
        factor = 2 if name == "final_norm.weight" else 1
        assert torch.equal(found[name].read(), factor * tensor), name


def test_keys_without_a_meaning_are_named(tmp_path: Path) -> None:
    change_config(saved(tmp_path), unheard_of=3, other=[1], harmless=None, use_cache=True)
    (note,) = open_hf(tmp_path).notes
    assert note.code == "hf-keys-unused"
    assert "other, unheard_of" in note.render()


def test_missing_and_foreign_files_are_rejected(tmp_path: Path) -> None:
    assert not is_hf(tmp_path)
    with raises_problem("hf-folder-without-config"):
        open_hf(tmp_path)
    assert is_hf(saved(tmp_path))
    tensors = tensors_in(tmp_path)
    (tmp_path / SINGLE).unlink()
    with raises_problem("hf-folder-without-weights"):
        open_hf(tmp_path)
    torch.save({"a": Trap(tmp_path / "sprung")}, tmp_path / PICKLED)
    with raises_problem("tensor-file-unreadable"):
        open_hf(tmp_path)
    assert not (tmp_path / "sprung").exists()
    for places in ({"a": "../x.safetensors"}, {"a": ""}, {"a": 1}, None):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
        with raises_problem("foreign-file-unreadable"):
            open_hf(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "x.safetensors"}}))
    with raises_problem("checkpoint-file-missing"):
        open_hf(tmp_path)
    (tmp_path / INDEX).unlink()
    save_file({**tensors, "model.layers.0.adapter.weight": torch.ones(1)}, tmp_path / SINGLE)
    with raises_problem("hf-tensors-unknown", contains="adapter"):
        open_hf(tmp_path)


def test_a_tensor_has_the_values_of_its_shape(tmp_path: Path) -> None:
    """A file of a few bytes can describe a table that no memory has room for."""
    tensors = tensors_in(saved(tmp_path))
    (tmp_path / SINGLE).unlink()
    rows = 2**40
    tensors["model.embed_tokens.weight"] = torch.ones(1).expand(rows, 32)
    tensors["lm_head.weight"] = torch.ones(1).expand(rows, 32)
    torch.save(tensors, tmp_path / PICKLED)
    change_config(tmp_path, vocab_size=rows)
    with raises_problem("foreign-file-unreadable", contains=str(rows)):
        open_hf(tmp_path)


def test_a_window_is_an_option_of_the_model(tmp_path: Path) -> None:
    source = open_hf(saved(tmp_path / "a", "mistral-window"))
    assert (source.settings.model.window_size, source.settings.model.seq_length) == ("4,0", 64)
    write_weights_folder(source, tmp_path / "ours")
    write_hf(open_weights_folder(tmp_path / "ours"), tmp_path / "again")
    config = load_strictly(tmp_path / "again").config
    assert (config.sliding_window, config.max_position_embeddings) == (5, 64)
    folder = saved(tmp_path / "b", "mistral")
    assert open_hf(folder).settings.model.window_size is None
    change_config(folder, sliding_window=...)
    assert open_hf(folder).settings.model.window == 4096
    change_config(folder, sliding_window=0)
    with raises_problem("hf-parts-lacking", contains="sliding_window"):
        open_hf(folder)


def test_windows_of_some_layers_are_options_of_the_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "a", "qwen2-window")
    model = open_hf(folder).settings.model
    assert (model.window_size, model.windows) == ("4,0", (None, 5))
    change_config(folder, layer_types=None)
    assert open_hf(folder).settings.model.windows == (None, 5)
    change_config(folder, max_window_layers=0, sliding_window=...)
    assert open_hf(folder).settings.model.windows == (4096, 4096)
    change_config(folder, max_window_layers=...)
    assert open_hf(folder).settings.model.windows == (None, None)
    for name, first in (("qwen2-window", 1), ("qwen3-window", 0)):
        write_hf(open_hf(saved(tmp_path / name, name)), tmp_path / f"{name} again")
        config = load_strictly(tmp_path / f"{name} again").config
        assert (config.sliding_window, config.max_window_layers) == (5, first)
        kinds = ["sliding_attention", "full_attention"]
        assert config.layer_types == (kinds if first == 0 else kinds[::-1])


def test_a_window_in_some_layers_is_no_mistral(tmp_path: Path) -> None:
    options = {**LLAMA_LIKE, "window_size": "4,0", "window_attn_skip_freq": "2"}
    with raises_problem("hf-no-family", contains="window_attn_skip_freq"):
        write_hf(random_source(ModelConfig(**SMALL, **options)), tmp_path)


def test_a_folder_of_a_version_without_windows_has_its_window(tmp_path: Path) -> None:
    write_weights_folder(open_hf(saved(tmp_path / "a", "mistral")), tmp_path / "ours")
    values = json.loads((tmp_path / "ours" / SETTINGS).read_text())
    write_settings(tmp_path / "ours", values | {"longest_sequence": 12, "max_positions": 64})
    assert open_weights_folder(tmp_path / "ours").settings.model.window == 12


@pytest.mark.parametrize(("options", "expected"), TABLES["families"])
def test_a_family_that_has_the_parts_is_chosen(
    tmp_path: Path, options: dict[str, Any], expected: str
) -> None:
    """The vocabulary's padding does not appear in the file."""
    source = random_source(ModelConfig(**SMALL, **options))
    write_hf(source, tmp_path / "hf")

    model = load_strictly(tmp_path / "hf")

    assert model.config.model_type == expected
    assert model.config.eos_token_id is None
    own = logits(source, TOKENS)
    assert (logits_of(model) - own).abs().max() / own.abs().max() < 1e-5


def test_a_given_family_must_have_the_parts(tmp_path: Path) -> None:
    source = random_source(ModelConfig(**SMALL, **LLAMA_LIKE))
    write_hf(source, tmp_path / "hf", WriteOptions(hf_model_type="mistral"))
    assert load_strictly(tmp_path / "hf").config.model_type == "mistral"
    with raises_problem("hf-no-family", contains="embed_layernorm"):
        write_hf(source, tmp_path / "other", WriteOptions(hf_model_type="bloom"))
    # The family takes "gelu" for its tanh approximation, and has no other name of the exact one.
    gemma = {**LLAMA_LIKE, "activation": "geglu", "apply_layernorm_1p": True}
    gemma |= {"embedding_multiplier": SMALL["hidden_size"] ** 0.5}
    gemma |= {"untie_embeddings_and_output_weights": False}
    options = WriteOptions(hf_model_type="gemma")
    for approximation in ("tanh", "none"):
        model = ModelConfig(**SMALL, **gemma, gelu_approximation=approximation)
        if approximation == "none":
            with raises_problem("hf-no-family", contains="gelu_approximation none"):
                write_hf(random_source(model), tmp_path / "exact", options)
        else:
            write_hf(random_source(model), tmp_path / "gemma", options)
    alibi = random_source(ModelConfig(**SMALL, position_embedding_type="none"))
    with raises_problem("hf-no-family"):
        write_hf(alibi, tmp_path / "other")


def with_predictions(folder: Path, name: str) -> Any:
    """Saves a model whose last layer is of multi-token prediction, as such models are published.

    Returns:
        The model without that layer, which has it as `depth`.
    """
    model = random_model(name, num_hidden_layers=3)
    model.save_pretrained(folder)
    hidden = model.config.hidden_size
    generator = torch.Generator().manual_seed(5)
    shapes = {**dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))}
    shapes["eh_proj"] = hidden, 2 * hidden
    model.depth = model.model.layers[2]
    model.extra = {
        name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    model.model.layers = model.model.layers[:2]
    tensors = tensors_in(folder)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    extra = {key: tensors[f"{original}.weight"].clone() for key, original in copies.items()}
    for key, value in (model.extra | extra).items():
        tensors[f"model.layers.2.{key}.weight"] = value
    save_file(tensors, folder / SINGLE)
    values = {"num_nextn_predict_layers": 1, "num_mtp_layers": ..., "mlp_layer_types": ...}
    change_config(folder, num_hidden_layers=2, **values)
    return model


def loss_of_predictions(model: Any) -> torch.Tensor:
    """Mean loss of the tokens two places ahead, by the definition of DeepSeek-V3."""
    base = model.model
    weights = model.extra
    length = TOKENS.shape[1] - 1

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        eps = model.config.rms_norm_eps
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weights[name], eps)

    hidden = base(TOKENS).last_hidden_state[:, :-1]
    parts = norm(base.embed_tokens(TOKENS[:, 1:]), "enorm"), norm(hidden, "hnorm")
    x = torch.cat(parts, -1) @ weights["eh_proj"].t()
    mask = torch.full((1, 1, length, length), float("-inf")).triu(1)
    places = base.rotary_emb(x, torch.arange(1, length + 1)[None])
    x = model.depth(x, attention_mask=mask, position_embeddings=places)
    logits = model.lm_head(norm(x, "shared_head.norm"))[:, :-1]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), TOKENS[:, 2:].flatten())


@pytest.mark.parametrize("name", ["glm4-moe", "deepseek-v3"])
def test_predictions_are_read_and_written(tmp_path: Path, name: str) -> None:
    """Claim (conversion): the layers of multi-token prediction of GLM-4.5 and DeepSeek-V3 have the
    loss of their definition, and come back byte by byte
    """
    theirs = with_predictions(tmp_path / "theirs", name)
    source = open_hf(tmp_path / "theirs")
    assert source.settings.model.mtp_num_layers == 1
    write_weights_folder(source, tmp_path / "ours")
    write_hf(open_weights_folder(tmp_path / "ours"), tmp_path / "again")
    assert_same_files(tmp_path / "again", tmp_path / "theirs")
    config = json.loads((tmp_path / "again" / HF_CONFIG).read_text())
    assert (config["num_hidden_layers"], config["num_nextn_predict_layers"]) == (2, 1)

    ours = load_model(source, Mesh.single(), torch.device("cpu")).train()
    labels = torch.cat([TOKENS[:, 1:], torch.zeros_like(TOKENS[:, :1])], 1)
    mask = torch.ones_like(TOKENS, dtype=torch.float32)
    mask[:, -1] = 0.0
    with torch.no_grad():
        total, count = ours(TOKENS, labels, mask).extras["mtp_1_loss"]
        expected = loss_of_predictions(theirs)
    assert float(total / count) == pytest.approx(float(expected), rel=1e-5)

    without = source.without_predictions()
    write_hf(without, tmp_path / "without")
    assert open_hf(tmp_path / "without").settings.model.mtp_num_layers == 0
    tensors = tensors_in(tmp_path / "theirs")
    tensors["model.layers.2.embed_tokens.weight"] *= 2
    save_file(tensors, tmp_path / "theirs" / SINGLE)
    with raises_problem("hf-tied-weights-differ", contains="layers.2.embed_tokens"):
        open_hf(tmp_path / "theirs")
    del tensors["model.layers.2.enorm.weight"], tensors["model.layers.2.embed_tokens.weight"]
    save_file(tensors, tmp_path / "theirs" / SINGLE)
    with raises_problem("hf-tensors-missing", contains="layers.2.enorm"):
        open_hf(tmp_path / "theirs")


def test_layers_with_experts_may_be_listed_in_any_way(tmp_path: Path) -> None:
    source = open_hf(saved(tmp_path / "theirs", "glm4-moe"))
    fixed = {**source.settings.fixed, "moe_layer_freq": "[0, 1]"}
    settings = dataclasses.replace(source.settings, fixed=fixed)
    write_hf(dataclasses.replace(source, settings=settings), tmp_path / "again")
    assert_same_files(tmp_path / "again", tmp_path / "theirs")


def test_predictions_are_left_out_with_a_warning(tmp_path: Path) -> None:
    source = random_source(ModelConfig(**SMALL, **LLAMA_LIKE, mtp_num_layers=2))
    warnings: list[str] = []
    write_hf(source, tmp_path / "hf", WriteOptions(warn=warnings.append))
    assert len(warnings) == 2  # it has no tokenizer
    assert "lacks the 2 layers of multi-token prediction (mtp_num_layers)" in warnings[0]
    own = logits(source, TOKENS)
    found = logits_of(load_strictly(tmp_path / "hf"))
    assert (found - own).abs().max() / own.abs().max() < 1e-5


def test_the_tokenizer_of_a_run_is_exported(tmp_path: Path) -> None:
    tokenizer = gpt2_files(tmp_path)
    write_hf(random_source(ModelConfig(**SMALL), tokenizer), tmp_path / "hf")

    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")

    from megatron_ds.tokenizer import build_tokenizer

    own = build_tokenizer(tokenizer)
    assert loaded("hello hel")["input_ids"] == own.encode("hello hel")
    assert loaded.eos_token == END
    assert loaded.eos_token_id == own.eod


def test_an_exported_tokenizer_json_keeps_its_ids(tmp_path: Path) -> None:
    """Without a class, transformers takes that of the model, which splits words in its own way."""
    file = Path(__file__).parents[2] / "golden" / "tokenizers" / "tokenizer.json"
    tokenizer = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(file))
    write_hf(random_source(ModelConfig(**SMALL, **LLAMA_LIKE), tokenizer), tmp_path / "hf")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    text = "the end of 2024\n  <|endoftext|>"
    from megatron_ds.tokenizer import build_tokenizer

    assert loaded(text)["input_ids"] == build_tokenizer(tokenizer).encode(text)


def test_a_hugging_face_tokenizer_is_kept(tmp_path: Path) -> None:
    """Its files, but not those of the model beside them."""
    gpt2_files(tmp_path)
    theirs = saved(tmp_path / "theirs")
    tokenizer = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    tokenizer.save_pretrained(theirs)
    (theirs / "chat_template.jinja").write_text("{{ messages }}")
    write_weights_folder(open_hf(theirs), tmp_path / "ours")
    write_hf(open_weights_folder(tmp_path / "ours"), tmp_path / "again")

    names = {path.name for path in theirs.iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "again" / name).read_bytes() == (theirs / name).read_bytes()
