"""GGUF files of llama.cpp: what is written, read back, and refused. No engine runs here."""

from __future__ import annotations

import dataclasses
import json
import random
import resource
import signal
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_ds.config import ModelConfig, TokenizerConfig
from megatron_ds.config.problems import UserError
from megatron_ds.conversion.gguf.file import quantized
from megatron_ds.conversion.gguf.read_write import open_gguf, write_gguf
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.registry import recognize
from megatron_ds.conversion.source import SourceCheckpoint, WriteOptions
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.loading.programs.convert_options import Options
from megatron_ds.tokenizer import build_tokenizer
from megatron_ds.tokenizer.export import sentencepiece_model
from tests.faults import is_killed_at
from tests.problems import codes, raises_problem
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables
from tests.unit.conversion.hf_models import MODELS, random_model
from tests.unit.conversion.models import (
    LLAMA,
    SMALL,
    assert_same_tensors,
    logits,
    random_source,
)
from tests.unit.conversion.test_exported_tokenizers import CASES, TEXTS, config_of
from tests.unit.tokenizer.test_sentencepiece import trained

TABLES = tables(__file__)
CHANGES: dict[str, dict[str, Any]] = TABLES["changes"]
REFUSED = {name for name, changes, _ in TABLES["refused"] if not changes} - CHANGES.keys()
COMPUTED = [name for name in MODELS if name not in REFUSED]
TOKENS = torch.randint(0, 50, (1, 24), generator=torch.Generator().manual_seed(3))
SPM = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
TYPES = (torch.float32, torch.bfloat16, torch.float16)


def source_of(name: str, folder: Path, **changes: Any) -> SourceCheckpoint:
    """A small model of a family."""
    random_model(name, **changes).save_pretrained(folder / name)
    return open_hf(folder / name)


def computed(name: str, folder: Path) -> SourceCheckpoint:
    """The same, as llama.cpp computes it."""
    return source_of(name, folder, **CHANGES.get(name, {}))


def written(source: SourceCheckpoint, folder: Path, **options: Any) -> Path:
    path = folder / "model.gguf"
    path.unlink(missing_ok=True)
    write_gguf(source, path, WriteOptions(**options))
    return path


def content_of(path: Path) -> tuple[dict[str, Any], dict[str, np.ndarray[Any, Any]]]:
    """Keys and tensors, as the library reads them."""
    reader = gguf.GGUFReader(path)
    keys = {name: field.contents() for name, field in reader.fields.items()}
    return keys, {tensor.name: np.array(tensor.data) for tensor in reader.tensors}


@pytest.mark.parametrize(("name", "dtype"), with_proofs(*rotated(COMPUTED, TYPES)))
def test_each_family_is_read_back(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Claim (conversion): a GGUF file in fp32, bf16 or fp16 of each family that llama.cpp has gives
    the same weights, byte by byte, and the same options of the model
    """
    source = computed(name, tmp_path)
    expected = source.to(dtype)
    again = open_gguf(written(expected, tmp_path))
    assert_same_tensors(again, expected)
    assert again.settings.fixed == source.settings.fixed
    assert again.settings.defaults["seq_length"] == source.settings.defaults["seq_length"]
    assert again.settings.defaults["hidden_dropout"] == 0.0
    assert recognize(tmp_path / "model.gguf").name == "gguf"


@pytest.mark.parametrize(("name", "changes", "part"), TABLES["refused"])
def test_what_llama_cpp_computes_differently_is_refused(
    name: str, changes: dict[str, Any], part: str, tmp_path: Path
) -> None:
    """Claim (conversion): what llama.cpp would compute differently, such as a window, a factor of
    YaRN or an activation that its architecture lacks, is refused by name before anything is written
    """
    source = source_of(name, tmp_path, **changes)
    with raises_problem("gguf-no-architecture", contains=part):
        write_gguf(source, tmp_path / "model.gguf")
    assert not list(tmp_path.glob("*.gguf*"))


def test_rows_of_queries_and_keys_are_interleaved(tmp_path: Path) -> None:
    """By the number of their own heads, biases too, where neighbors are rotated together."""
    source = computed("llama-biases", tmp_path)
    _, tensors = content_of(written(source, tmp_path))
    model = source.settings.model
    qkv = source.tensors["layers.1.attention.qkv.weight"].read()
    bias = source.tensors["layers.1.attention.qkv.bias"].read()
    half = model.head_dim // 2
    for head in range(model.num_attention_heads):
        for at in range(half):
            ours = qkv[head * model.head_dim + at + half]
            row = tensors["blk.1.attn_q.weight"][head * model.head_dim + 2 * at + 1]
            assert np.array_equal(row, ours.numpy())
    queries = model.num_attention_heads * model.head_dim
    keys = bias[queries : queries + model.kv_heads * model.head_dim]
    expected = keys.view(model.kv_heads, 2, half).transpose(1, 2).reshape(-1)
    assert np.array_equal(tensors["blk.1.attn_k.bias"], expected.numpy())
    _, neox = content_of(written(computed("qwen2", tmp_path), tmp_path))
    weight = open_hf(tmp_path / "qwen2").tensors["layers.0.attention.qkv.weight"].read()
    assert np.array_equal(neox["blk.0.attn_q.weight"], weight[: len(neox["blk.0.attn_q.weight"])])


def test_tensors_have_the_forms_of_the_runtime(tmp_path: Path) -> None:
    keys, tensors = content_of(written(computed("gemma", tmp_path), tmp_path))
    norm = open_hf(tmp_path / "gemma").tensors["final_norm.weight"].read()
    assert np.array_equal(tensors["output_norm.weight"], (norm + 1).numpy())
    assert "output.weight" not in tensors  # tied
    _, tensors = content_of(written(computed("qwen3-moe", tmp_path), tmp_path))
    experts = open_hf(tmp_path / "qwen3-moe").tensors["layers.0.mlp.experts.fc_in.weight"].read()
    assert np.array_equal(tensors["blk.0.ffn_up_exps.weight"], experts[:, 24:].numpy())
    keys, tensors = content_of(written(computed("deepseek-v3", tmp_path), tmp_path))
    rows = open_hf(tmp_path / "deepseek-v3").tensors["layers.0.attention.kv_up.weight"].read()
    heads = rows.view(4, 14, 10)
    assert np.array_equal(tensors["blk.0.attn_k_b.weight"], heads[:, :8].transpose(1, 2).numpy())
    assert np.array_equal(tensors["blk.0.attn_v_b.weight"], heads[:, 8:].numpy())
    assert keys["deepseek2.attention.head_count_kv"] == 1
    assert keys["deepseek2.expert_gating_func"] == 2
    keys, _ = content_of(written(computed("gemma3", tmp_path), tmp_path))
    assert keys["gemma3.attention.sliding_window_pattern"] == [True] * 5 + [False]
    assert keys["gemma3.rope.freq_base_swa"] == 10000
    keys, tensors = content_of(written(computed("llama3", tmp_path), tmp_path))
    rates = 500000.0 ** -(np.arange(0, 8, 2) / 8)
    lengths = 2 * np.pi / rates
    assert tensors["rope_freqs.weight"][0] == 1
    assert tensors["rope_freqs.weight"][-1] == pytest.approx(8 if lengths[-1] > 8192 else 1)
    assert "llama.rope.scaling.type" not in keys


def test_norms_and_biases_keep_32_bits(tmp_path: Path) -> None:
    path = written(computed("glm4-moe-biases", tmp_path).to(torch.bfloat16), tmp_path)
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types["blk.1.ffn_gate_exps.weight"] == types["token_embd.weight"] == "BF16"
    small = ("attn_q.bias", "attn_norm.weight", "ffn_gate_inp.weight", "exp_probs_b.bias")
    assert {types[f"blk.1.{name}"] for name in small} == {"F32"}
    assert content_of(path)[0]["general.file_type"] == 32


def test_8_bits_are_read_as_the_values_they_stand_for(tmp_path: Path) -> None:
    model = ModelConfig(**{**SMALL, **LLAMA, "hidden_size": 64, "ffn_hidden_size": 96})
    source = random_source(model)
    path = written(source, tmp_path, quantization="q8_0")
    types = {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}
    assert types["blk.0.attn_q.weight"] == types["token_embd.weight"] == "Q8_0"
    assert types["blk.0.attn_norm.weight"] == "F32"
    again = open_gguf(path)
    assert codes(again.notes) == ["gguf-dequantized"]
    for name, tensor in source.tensors.items():
        value = tensor.read()
        error = (again.tensors[name].read() - value).abs().max()
        assert error <= value.abs().max() / 127 * 0.57, name
    raw = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path).tensors}
    theirs = gguf.quants.dequantize(raw["blk.0.ffn_down.weight"], gguf.GGMLQuantizationType.Q8_0)
    own = again.tensors["layers.0.mlp.fc_out.weight"].read()
    assert np.array_equal(own.numpy(), theirs)


def test_master_weights_are_quantized() -> None:
    """They are parameters of an optimizer."""
    value = torch.arange(64.0).reshape(2, 32)
    parameter = torch.nn.Parameter(value.clone())
    assert torch.equal(
        quantized(TensorReader.of(parameter)).read(), quantized(TensorReader.of(value)).read()
    )


def test_a_norm_that_another_program_changed_is_read_from_the_file(tmp_path: Path) -> None:
    """The exact weights in this program's keys count only next to the sums that they belong to."""
    path = written(computed("gemma", tmp_path), tmp_path)
    keys, tensors = content_of(path)
    assert any(key.startswith("megatron_ds.norm.") for key in keys)
    place = next(t for t in gguf.GGUFReader(path).tensors if t.name == "output_norm.weight")
    with open(path, "r+b") as file:
        file.seek(place.data_offset)
        file.write((tensors["output_norm.weight"] * 2).tobytes())
    expected = tensors["output_norm.weight"] * 2 - 1
    assert np.array_equal(open_gguf(path).tensors["final_norm.weight"].read().numpy(), expected)


def byte_level(splits: list[str], *, has_own: bool, ignore_merges: bool) -> Any:
    """A tokenizer of the library that is trained on the texts."""
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    steps = [pre_tokenizers.Split(tokenizers.Regex(text), "isolated") for text in splits]
    own = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_own)
    library.pre_tokenizer = pre_tokenizers.Sequence([*steps, own])
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([*TEXTS] * 20, trainer)
    return library


def with_library(library: Any, folder: Path) -> SourceCheckpoint:
    """A model with a tokenizer of the library, and rows without a token."""
    library.save(str(folder / "tokenizer.json"))
    config = TokenizerConfig(
        tokenizer_type="HFTokenizer", tokenizer_model=str(folder / "tokenizer.json")
    )
    return with_tokenizer(config)


def with_tokenizer(config: TokenizerConfig, unused: int = 3) -> SourceCheckpoint:
    rows = build_tokenizer(config).vocab_size + unused
    return random_source(ModelConfig(**{**SMALL, **LLAMA, "vocab_size": rows}), config)


@pytest.mark.parametrize(("splits", "has_own", "ignore_merges", "expected"), TABLES["splits"])
def test_an_own_vocabulary_gets_the_pre_of_its_regular_expression(
    splits: list[str], has_own: bool, ignore_merges: bool, expected: str, tmp_path: Path
) -> None:
    """Claim (conversion): a byte-level vocabulary of one's own is exported to GGUF with the `pre`
    of its regular expression, however it is spelled
    """
    library = byte_level(splits, has_own=has_own, ignore_merges=ignore_merges)
    source = with_library(library, tmp_path)
    keys, tensors = content_of(written(source, tmp_path))
    assert keys["tokenizer.ggml.model"] == "gpt2"
    assert keys["tokenizer.ggml.pre"] == expected
    tokens = keys["tokenizer.ggml.tokens"]
    assert tokens[:600] == [library.id_to_token(at) for at in range(len(tokens) - 3)]
    assert len(tokens) == len(tensors["token_embd.weight"]) == source.settings.model.vocab_size
    assert keys["tokenizer.ggml.token_type"][-3:] == [5, 5, 5]
    assert keys["tokenizer.ggml.token_type"][:2] == [3, 1]
    assert keys["tokenizer.ggml.eos_token_id"] == 0
    assert keys["tokenizer.ggml.add_bos_token"] is False
    merges = json.loads(library.to_str())["model"]["merges"]
    assert keys["tokenizer.ggml.merges"] == [" ".join(pair) for pair in merges]


def test_all_reasons_are_named_at_once(tmp_path: Path) -> None:
    """An unknown regular expression with the nearest one and its words, and a window."""
    library = byte_level([r"\p{L}+|\p{N}{1,2}|\s+|[^\s\p{L}\p{N}]+"], has_own=False,
                         ignore_merges=False)  # fmt: skip
    source = with_library(library, tmp_path)
    fixed = {**source.settings.fixed, "window_size": "4,0"}
    source = dataclasses.replace(source, settings=dataclasses.replace(source.settings, fixed=fixed))
    (tmp_path / "model.gguf").write_bytes(b"good")
    with pytest.raises(UserError) as raised:
        write_gguf(source, tmp_path / "model.gguf")
    expected = ["output-file-exists", "gguf-no-architecture", "gguf-split-unknown"]
    assert codes(raised.value.problems) == expected
    assert "'gpt-2'" in str(raised.value)
    assert "of 1000 words" in str(raised.value)
    assert "[^\\s\\p{L}\\p{N}]+" in str(raised.value)
    assert (tmp_path / "model.gguf").read_bytes() == b"good"


@pytest.mark.parametrize("name", ["space", "lower", "bert", "char"])
def test_a_tokenizer_that_llama_cpp_lacks_is_refused(name: str, tmp_path: Path) -> None:
    if name in CASES:
        source = with_tokenizer(config_of(name, tmp_path))
    else:
        library = byte_level([], has_own=True, ignore_merges=False)
        if name == "space":
            library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        else:
            library.normalizer = tokenizers.normalizers.Lowercase()
        source = with_library(library, tmp_path)
    with raises_problem("gguf-tokenizer-inexpressible"):
        write_gguf(source, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize(("kind", "training", "part"), TABLES["pieces"])
def test_a_sentencepiece_model_that_llama_cpp_lacks_is_refused(
    kind: str, training: dict[str, Any], part: str, tmp_path: Path
) -> None:
    path = trained(
        tmp_path / "m.model",
        **{"model_type": kind, "vocab_size": 400, "hard_vocab_limit": kind == "bpe", **training},
    )
    config = TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=path)
    with raises_problem("gguf-tokenizer-inexpressible", contains=part):
        write_gguf(with_tokenizer(config), tmp_path / "model.gguf")


def test_a_sentencepiece_model_keeps_pieces_scores_and_types(tmp_path: Path) -> None:
    path = trained(tmp_path / "m", model_type="bpe", vocab_size=400, byte_fallback=True, **SPM)
    config = TokenizerConfig(tokenizer_type="Llama2Tokenizer", tokenizer_model=path)
    keys, _ = content_of(written(with_tokenizer(config), tmp_path))
    proto = sentencepiece_model.read_model(Path(path).read_bytes())
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.tokens"][:400] == [piece.piece for piece in proto.pieces]
    assert keys["tokenizer.ggml.scores"][:400] == [piece.score for piece in proto.pieces]
    assert keys["tokenizer.ggml.token_type"][:400] == [piece.type for piece in proto.pieces]
    assert keys["tokenizer.ggml.add_bos_token"] is True
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    library = sentencepiece_model.library_of(proto, path, {})
    library.add_special_tokens(sentencepiece_model.pieces_of(proto, (2, 3)))
    merged, _ = content_of(written(with_library(library, tmp_path), tmp_path))
    merging = [at for at, piece in enumerate(proto.pieces) if len(piece.piece) > 1 == piece.type]
    order, again = (
        sorted(merging, key=values["tokenizer.ggml.scores"].__getitem__)
        for values in (keys, merged)
    )
    assert order == again
    assert merged["tokenizer.ggml.model"] == "llama"


def test_an_interruption_leaves_no_file(tmp_path: Path) -> None:
    """Claim (conversion): a full disk, a killed conversion or a target that exists leaves neither
    half a GGUF file nor a lost one
    """
    source = computed("llama", tmp_path)
    target = tmp_path / "out" / "model.gguf"
    assert is_killed_at("os.fsync:1", lambda: write_gguf(source, target))
    assert not target.exists()
    write_gguf(source, target)
    assert [path.name for path in target.parent.iterdir()] == ["model.gguf"]
    content = target.read_bytes()
    with raises_problem("output-file-exists", "save", contains=str(target)):
        write_gguf(source, target)
    assert target.read_bytes() == content


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    source = computed("llama", tmp_path)
    target = tmp_path / "out" / "model.gguf"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    for size in (100, 20_000):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
            with pytest.raises(OSError, match="too large") as raised:
                write_gguf(source, target)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            signal.signal(signal.SIGXFSZ, handler)
        assert str(target) in str(raised.value)
        assert list(target.parent.iterdir()) == []


def test_a_damaged_file_is_refused_in_words(tmp_path: Path) -> None:
    """Truncated anywhere, or with other bytes in what describes its tensors."""
    path = written(computed("llama", tmp_path), tmp_path)
    content = path.read_bytes()
    start = min(tensor.data_offset for tensor in gguf.GGUFReader(path).tensors)
    generator = random.Random(6)
    damaged = [content[:size] for size in range(0, len(content) - 40, len(content) // 40)]
    for _ in range(150):
        changed = bytearray(content)
        changed[generator.randrange(start)] = generator.randrange(256)
        damaged.append(bytes(changed))
    messages = []
    for data in damaged:
        path.write_bytes(data)
        try:
            for tensor in open_gguf(path).tensors.values():
                tensor.read()
        except UserError as error:
            messages.append(str(error))
    assert len(messages) > 100
    assert all(str(path) in message or "blk." in message for message in messages)


def test_other_quantizations_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    data = np.zeros((2, 144), np.uint8)
    writer.add_tensor("token_embd.weight", data, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with raises_problem("gguf-type-unsupported", contains="Q4_K"):
        open_gguf(path)


def test_an_export_of_a_file_is_a_model_of_transformers(tmp_path: Path) -> None:
    source = computed("qwen3", tmp_path)
    write_hf(open_gguf(written(source, tmp_path)), tmp_path / "hf")
    assert torch.equal(logits(open_hf(tmp_path / "hf"), TOKENS), logits(source, TOKENS))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"target_format": "gguf", "save": "x.gguf"}, []),
        ({"target_format": "gguf", "save": "x"}, ["gguf-file-name"]),
        ({"target_format": "hf", "save": "x", "dtype": "q8_0"}, ["quantized-without-gguf"]),
        (
            {"target_format": "gguf", "save": "x.gguf", "dtype": "q8_0", "verify": True},
            ["quantized-not-verified"],
        ),
    ],
)
def test_options_of_the_converter(
    options: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    path = written(computed("llama", tmp_path), tmp_path)
    assert codes(Options(load=str(path), **options).problems()) == expected
