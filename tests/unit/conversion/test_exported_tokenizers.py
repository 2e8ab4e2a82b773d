"""Tokenizers of runs in exported folders: the ids of the run, in `transformers`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers

from megatron_ds.config import ModelConfig, TokenizerConfig
from megatron_ds.config.problems import Problem
from megatron_ds.conversion.huggingface.tokenizer import TokenizerFiles, tokenizer_files
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from megatron_ds.tokenizer.fast_backend import EDGES
from megatron_ds.tokenizer.huggingface import build_hf_tokenizer
from tests.problems import raises_problem
from tests.tables import tables
from tests.token_files import write_pair
from tests.unit.conversion.models import SMALL
from tests.unit.tokenizer.test_golden import FOLDER
from tests.unit.tokenizer.test_hf_settings import make_folder
from tests.unit.tokenizer.test_sentencepiece import trained

CASES: dict[str, dict[str, Any]] = tables(__file__)["cases"]
TEXTS: list[str] = [*EDGES, *tables(__file__)["texts"]]
SPECIAL = ("</s>", "a<s>b", "<unk> <pad>", "<EOD>x<CLS>", "[EOS] [CLS]", "<|endoftext|>", "<0x41>")


def config_of(name: str, folder: Path) -> TokenizerConfig:
    """The tokenizer of a case, trained in a folder if it is a SentencePiece model."""
    options = dict(CASES[name])
    if (training := options.pop("trained", None)) is not None:
        training = {"vocab_size": 400} | training
        options["tokenizer_model"] = trained(folder / "trained.model", **training)
    for key in ("vocab_file", "merge_file", "tokenizer_model"):
        if key in options:
            options[key] = str(FOLDER / options[key])
    return TokenizerConfig(**options)


def exported(
    config: TokenizerConfig,
    folder: Path,
    model_type: str = "llama",
    data: dict[str, Any] | None = None,
) -> tuple[Tokenizer, TokenizerFiles, list[Problem]]:
    """Writes the files of a tokenizer, and config.json, to a new folder."""
    tokenizer = build_tokenizer(config)
    model = ModelConfig(**{**SMALL, "vocab_size": tokenizer.vocab_size})
    settings = ModelSettings.of(model, settings_without_experts(), config, tokenizer.eod)
    warnings: list[Problem] = []
    files = tokenizer_files(settings, model_type, warnings.append, data)
    folder.mkdir()
    for name, content in files.files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return tokenizer, files, warnings


def settings_without_experts() -> Any:
    from megatron_ds.config import MoEConfig

    return MoEConfig()


def assert_same_ids(tokenizer: Tokenizer, loaded: Any, texts: Sequence[str]) -> None:
    different = {}
    for text in texts:
        ids = loaded(text)["input_ids"]
        expected = tokenizer.encode(text)
        if ids != expected:
            different[text] = (ids, expected)
    assert different == {}


@pytest.mark.parametrize("name", CASES)
def test_the_export_has_the_ids_of_the_run(name: str, tmp_path: Path) -> None:
    """Claim (tokenizers): AutoTokenizer of an exported folder gives the ids of the run, for each
    kind of tokenizer
    """
    config = config_of(name, tmp_path)
    tokenizer, files, warnings = exported(config, tmp_path / "hf")
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert_same_ids(tokenizer, loaded, [*TEXTS, *SPECIAL])
    assert warnings == []
    assert loaded.eos_token_id == files.special_ids["eos_token_id"] == tokenizer.eod
    assert len(loaded) == tokenizer.vocab_size
    settings = json.loads(files.files["tokenizer_config.json"])
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    again = build_hf_tokenizer(str(tmp_path / "hf"), trust_remote_code=False)
    for text in [*TEXTS, *SPECIAL]:
        assert again.begin(again.encode(text)) == tokenizer.encode(text)
    assert (again.eod, again.vocab_size) == (tokenizer.eod, tokenizer.vocab_size)
    assert again.adds_bos == (config.tokenizer_type == "Llama2Tokenizer")


def test_a_family_with_its_own_class_is_named(tmp_path: Path) -> None:
    _, _, warnings = exported(config_of("char", tmp_path), tmp_path / "hf", "qwen2")
    assert [problem.code for problem in warnings] == ["hf-tokenizer-class"]


def test_a_model_of_words_is_named(tmp_path: Path) -> None:
    path = trained(
        tmp_path / "word.model", model_type="word", vocab_size=40, hard_vocab_limit=False
    )
    config = TokenizerConfig(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_model=path)
    _, files, warnings = exported(config, tmp_path / "hf")
    assert [problem.code for problem in warnings] == ["hf-tokenizer-inexpressible"]
    assert files.files == {}


def test_names_of_which_one_begins_the_other_are_named(tmp_path: Path) -> None:
    """The run takes the first one in its order, the library the longest."""
    pieces = {"bos_piece": "<x", "eos_piece": "<xy"}
    path = trained(tmp_path / "m", model_type="bpe", vocab_size=150, **pieces)
    config = TokenizerConfig(tokenizer_type="SentencePieceTokenizer", tokenizer_model=path)
    _, _, warnings = exported(config, tmp_path / "hf")
    assert [problem.code for problem in warnings] == ["exported-tokenizer-special-text"]


def test_other_ids_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron_ds.tokenizer.export import sentencepiece_model

    monkeypatch.setattr(sentencepiece_model, "_spaces", lambda model: [])
    with raises_problem("exported-tokenizer-differs", contains="ids"):
        exported(config_of("unigram", tmp_path), tmp_path / "hf")


@pytest.mark.parametrize("begins", [True, False, None])
def test_texts_begin_with_the_token_that_documents_of_the_run_have(
    begins: bool | None, tmp_path: Path
) -> None:
    """The folder's own template has the begin token."""
    theirs = make_folder(tmp_path / "theirs", "begin")
    config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(theirs))
    bos = build_tokenizer(config).bos
    assert bos is not None
    first = [bos] if begins else []
    if begins is not None:
        write_pair(tmp_path / "data", [[*first, 5, 6], [*first, 7]])
    data = {"data_path": [str(tmp_path / "data")]}
    tokenizer, _, warnings = exported(config, tmp_path / "hf", data=data)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert loaded("the")["input_ids"] == [bos][: begins is not False] + tokenizer.encode("the")
    assert [problem.code for problem in warnings] == ["hf-begin-token-unknown"] * (begins is None)
    again = build_hf_tokenizer(str(tmp_path / "hf"), trust_remote_code=False)
    assert (again.adds_bos, again.bos) == (begins is not False, bos)
    written = json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())
    assert ("add_bos_token" in written) == (begins is False)


def test_a_folder_without_a_class_gets_one(tmp_path: Path) -> None:
    """Otherwise transformers takes the class of the model, which splits words in its own way."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "tokenizer.json").write_bytes((FOLDER / "tokenizer.json").read_bytes())
    for settings in ({}, {"tokenizer_class": "TokenizersBackend"}):
        (theirs / "tokenizer_config.json").write_text(json.dumps(settings))
        config = TokenizerConfig(tokenizer_type="HFTokenizer", tokenizer_model=str(theirs))
        folder = tmp_path / f"hf{len(settings)}"
        tokenizer, _, warnings = exported(config, folder)
        loaded = transformers.AutoTokenizer.from_pretrained(folder)
        assert_same_ids(tokenizer, loaded, TEXTS)
        written = json.loads((folder / "tokenizer_config.json").read_text())
        assert (written["tokenizer_class"], warnings) == ("PreTrainedTokenizerFast", [])
        assert loaded.eos_token_id == tokenizer.eod
