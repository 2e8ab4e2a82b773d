"""What generation loads of weights in other formats than a training's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from megatron_ds import cli
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.weights_folder import write_weights_folder
from megatron_ds.inference.cli import open_checkpoint
from megatron_ds.inference.load_checkpoint import load_model
from megatron_ds.inference.samples.options import Options
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.tokenizer.end_tokens import read_end_tokens
from tests.problems import raises_problem
from tests.unit.conversion.hf_models import TOKENS, VOCAB, logits_of, random_model
from tests.unit.tokenizer.test_tokenizers import gpt2_files

NULL = ("--tokenizer-type", "NullTokenizer", "--vocab-size", VOCAB - 1)


@pytest.fixture
def model(tmp_path: Path) -> transformers.PreTrainedModel:
    """A Llama, saved without a tokenizer."""
    model = random_model("llama")
    model.save_pretrained(tmp_path / "theirs")
    return model


def options_of(load: object, *flags: object) -> Options:
    return cli.parse(Options, ["--load", str(load), "--prompt", "2", *map(str, flags)])


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("prefix", [False, True])
def test_models_of_transformers_are_loaded(
    tmp_path: Path, model: transformers.PreTrainedModel, native: bool, prefix: bool
) -> None:
    """Directly, and from a native folder of weights.

    Claim (conversion): text generation loads a Hugging Face model directly
    """
    folder = tmp_path / "theirs"
    name = "hf"
    if native:
        write_weights_folder(open_source(folder), tmp_path / "ours")
        folder = tmp_path / "ours"
        name = "native"
    options = options_of(f"{name}:{folder}" if prefix else folder, *NULL)

    source, config, tokenizer = open_checkpoint(options)
    own = load_model(source, Mesh.single(), torch.device("cpu"))

    assert source.format == name
    assert not own.training
    assert (config.vocab_size, tokenizer.vocab_size, tokenizer.eod) == (VOCAB, VOCAB, VOCAB - 1)
    expected = logits_of(model)
    found = own(TOKENS)[..., :VOCAB].detach()
    assert (found - expected).abs().max() / expected.abs().max() < 1e-5
    half = load_model(source, Mesh.single(), torch.device("cpu"), precision="bf16")
    assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}


ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], set[int]]] = {
    "a list": ({"eos_token_id": [3, 5, 7]}, {"eos_token_id": 1}, {3, 5, 7}),
    "an id": ({"eos_token_id": 3}, {"eos_token_id": [1, 2]}, {3}),
    "null": ({"eos_token_id": None}, {"eos_token_id": [1, 2]}, {1, 2}),
    "no key": ({"temperature": 0.5}, {"eos_token_id": 4}, {4}),
    "nothing": ({}, {"eos_token_id": None}, set()),
    "no ids of the vocabulary": ({"eos_token_id": [-1, VOCAB, VOCAB - 1, 0]}, {}, {0}),
}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("case", ENDS)
def test_a_model_ends_texts_at_each_end_token_of_its_folder(
    tmp_path: Path, model: transformers.PreTrainedModel, case: str, native: bool
) -> None:
    """Claim (serving): texts end at every end token of generation_config.json"""
    folder = tmp_path / "theirs"
    generation, config, expected = ENDS[case]
    (folder / "generation_config.json").write_text(json.dumps(generation))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | config))
    if native:
        write_weights_folder(open_source(folder), tmp_path / "ours")
        folder = tmp_path / "ours"
    _, _, tokenizer = open_checkpoint(options_of(folder, *NULL))
    assert tokenizer.further_ends == expected
    assert tokenizer.ends == {*expected, VOCAB - 1}


@pytest.mark.parametrize("value", ["</s>", [3, "x"], True, 1.5, {"a": 1}])
def test_end_tokens_that_are_no_ids_are_rejected(
    tmp_path: Path, model: transformers.PreTrainedModel, value: Any
) -> None:
    file = tmp_path / "theirs" / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": value}))
    with raises_problem("end-tokens-invalid", "tokenizer_model", contains="eos_token_id"):
        open_checkpoint(options_of(tmp_path / "theirs", *NULL))
    with raises_problem("end-tokens-invalid", "tokenizer_model", contains=str(file)):
        read_end_tokens(tmp_path / "theirs")


def test_a_tokenizer_keeps_the_end_tokens_of_its_model(tmp_path: Path) -> None:
    """In its folder, which checkpoints keep."""
    assert read_end_tokens(None) == read_end_tokens(tmp_path) == set()
    (tmp_path / "config.json").write_text('{"text_config": {"eos_token_id": [1, 106]}}')
    assert read_end_tokens(tmp_path) == {1, 106}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}')
    assert read_end_tokens(tmp_path) == {5}


def test_the_tokenizer_may_have_fewer_ids_than_the_model_but_not_more(
    tmp_path: Path, model: transformers.PreTrainedModel
) -> None:
    (tmp_path / "files").mkdir()
    gpt2_files(tmp_path / "files")
    tokenizer = transformers.GPT2Tokenizer.from_pretrained(tmp_path / "files")
    tokenizer.save_pretrained(tmp_path / "theirs")
    with raises_problem("tokenizer-does-not-match-model", contains=str(VOCAB)):
        open_checkpoint(options_of(tmp_path / "theirs"))

    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "theirs")
    _, config, found = open_checkpoint(options_of(tmp_path / "theirs"))
    assert (config.vocab_size, found.vocab_size) == (300, 259)
    assert found.encode("hello") == tokenizer("hello")["input_ids"]


def test_a_missing_tokenizer_and_other_flags_than_the_models_are_rejected(
    tmp_path: Path, model: transformers.PreTrainedModel, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, shown in (((), "--vocab-file"), ((*NULL, "--num-layers", 3), "--num-layers")):
        with pytest.raises(SystemExit):
            open_checkpoint(options_of(tmp_path / "theirs", *flags))
        error = capsys.readouterr().err
        assert shown in error
        assert ("[flag-differs-from-checkpoint]" in error) == bool(flags)


def test_padding_of_a_checkpoint_of_megatron_is_left_out(megatron_checkpoints: Path) -> None:
    data = megatron_checkpoints / "data"
    files = ("--vocab-file", data / "vocab.json", "--merge-file", data / "merges.txt")
    flags = ("--tokenizer-type", "GPT2BPETokenizer", *files)
    source, config, tokenizer = open_checkpoint(
        options_of(megatron_checkpoints / "mlm25_tp1", *flags)
    )
    assert config.vocab_size == tokenizer.vocab_size == 300
    model = load_model(source, Mesh.single(), torch.device("cpu"))
    reference = np.load(megatron_checkpoints / "mlm25_tp1" / "reference.npz")
    with torch.no_grad():
        found = model(torch.from_numpy(reference["tokens"]))
    expected = torch.from_numpy(reference["logits"])[..., :300]
    torch.testing.assert_close(found[..., :300], expected, atol=1e-5, rtol=0.0)
