"""What inference engines make of exports: the table of facts, and the checks of an export."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from megatron_ds.config.problems import Problem, UserError
from megatron_ds.conversion.engines.checks import LLAMA_CPP, Export, check_engines
from megatron_ds.conversion.engines.facts import (
    ADAPTATIONS,
    CLOSE,
    DIFFERS,
    EFFECTS,
    ENGINES,
    FACTS,
    REFUSES,
    facts_of,
)
from megatron_ds.conversion.gguf.read_write import architecture_of
from megatron_ds.conversion.huggingface.families import FAMILIES
from megatron_ds.conversion.huggingface.read_write import open_hf, write_hf
from megatron_ds.conversion.huggingface.written_config import config_of
from megatron_ds.conversion.published import Publication
from megatron_ds.conversion.source import SourceCheckpoint, WriteOptions
from megatron_ds.engine.states.state_reader import TensorReader
from megatron_ds.loading.merge import Options as MergeOptions
from megatron_ds.loading.programs.convert_options import Options
from tests.problems import codes, printed_codes, raises_problem
from tests.tables import tables
from tests.unit.conversion.hf_models import MODELS
from tests.unit.conversion.models import LLAMA, assert_same_tensors, model, random_source
from tests.unit.conversion.test_gguf import byte_level, source_of
from tests.unit.conversion.test_huggingface import tensors_in

TABLES = tables(__file__)


def export_of(source: SourceCheckpoint) -> Export:
    """The export of a model without a tokenizer, with the names of published files."""
    family, values = config_of(source, None)
    return Export(family, values, source.settings, FAMILIES[family].is_prefixed, True)


def faults(name: str, export: Export) -> list[str]:
    facts = facts_of(name, export.family, export.properties)
    return [fact.effect for fact in facts if fact.effect != CLOSE and not fact.only_on]


def test_the_table_is_complete() -> None:
    assert {fact.engine for fact in FACTS} == ENGINES.keys()
    properties = export_of(random_source(model(**LLAMA))).properties
    published = tables(str(Path(__file__).with_name("test_published_keys.py")))["published"]
    configs = {key for entry in published.values() for key in entry["keys"].split()}
    for fact in FACTS:
        assert {*fact.families} <= FAMILIES.keys(), fact
        assert fact.effect in EFFECTS
        assert fact.key in configs | properties.keys(), fact
        assert fact.values is None or fact.other_than is None
        assert fact.adapt in ("", *ADAPTATIONS)
        assert fact.why
        assert fact.source


@pytest.mark.parametrize(("name", "changes", "expected"), TABLES["exports"])
def test_engines_that_compute_another_model_are_named(
    name: str, changes: dict[str, Any], expected: dict[str, str], tmp_path: Path
) -> None:
    """Claim (conversion): an export names, in one line, the inference engines that would compute
    another model from it or refuse it, and with `--for` it is refused instead
    """
    source = source_of(name, tmp_path, **changes)
    lines: list[str] = []
    write_hf(source, tmp_path / "export", WriteOptions(warn=lines.append))
    reported = [line for line in lines if printed_codes(line) == ["engines-differ"]]
    assert len(reported) == bool(expected)
    for engine, effect in expected.items():
        assert ENGINES[engine].title in reported[0]
        code = {REFUSES: "engine-refuses", DIFFERS: "engine-differs"}[effect]
        with pytest.raises(UserError) as raised:
            write_hf(source, tmp_path / engine, WriteOptions(engines=[engine]))
        assert code in codes(raised.value.problems)
        assert not (tmp_path / engine).exists()
    others = [one for one in ENGINES if one not in expected and one != LLAMA_CPP]
    equal = [one for one in others if not faults(one, export_of(source))]
    if name == "llama" and not changes:
        assert equal == others
    write_hf(source, tmp_path / "others", WriteOptions(engines=equal, warn=lines.append))
    assert [line for line in lines if printed_codes(line) == ["engines-differ"]] == reported


@pytest.mark.parametrize("name", MODELS)
def test_facts_of_llama_cpp_are_what_gguf_refuses(name: str, tmp_path: Path) -> None:
    """A model that a fact refuses has no architecture; one of a family without facts has."""
    source = source_of(name, tmp_path)
    try:
        architecture_of(source.settings)
        is_refused = False
    except UserError:
        is_refused = True
    named = REFUSES in faults(LLAMA_CPP, export_of(source))
    assert named == is_refused or (is_refused and name in TABLES["refused_for_more"])


def test_an_export_is_adapted_to_engines(tmp_path: Path) -> None:
    """Names without the prefix for mlx-lm, more special tokens for CTranslate2."""
    folder = tmp_path / "prefixed"
    source = source_of("gpt2", tmp_path)
    library = byte_level([], has_own=True, ignore_merges=False)
    library.save(str(tmp_path / "tokenizer.json"))
    publication = Publication.of_folder(tmp_path / "gpt2", source.settings, has_prefix=True)
    settings = dataclasses.replace(
        source.settings,
        published=publication.asdict(),
        tokenizer={
            "tokenizer_type": "HFTokenizer",
            "tokenizer_model": str(tmp_path / "tokenizer.json"),
        },
        fixed={**source.settings.fixed, "vocab_size": library.get_vocab_size()},
    )
    tensors = dict(source.tensors)
    rows = torch.randn(library.get_vocab_size(), 32)
    tensors["embedding.word.weight"] = TensorReader.of(rows)
    source = dataclasses.replace(source, settings=settings, tensors=tensors)
    write_hf(source, folder)
    assert all(name.startswith("transformer.") for name in tensors_in(folder))
    write_hf(source, tmp_path / "adapted", WriteOptions(engines=["mlx", "ctranslate2"]))
    assert not any(name.startswith("transformer.") for name in tensors_in(tmp_path / "adapted"))
    assert_same_tensors(open_hf(tmp_path / "adapted"), open_hf(folder))
    plain, adapted = (
        AutoTokenizer.from_pretrained(tmp_path / one) for one in ("prefixed", "adapted")
    )
    assert (plain.bos_token, plain.unk_token) == (None, None)
    assert adapted.bos_token == adapted.unk_token == plain.eos_token
    for text in ("hello  world", "\u00e9\n", "<|endoftext|>a"):
        assert plain(text)["input_ids"] == adapted(text)["input_ids"]
    settings_file = tmp_path / "adapted" / "tokenizer_config.json"
    assert json.loads(settings_file.read_text())["unk_token"] == plain.eos_token


def test_names_of_engines_are_separated_by_commas_or_spaces(tmp_path: Path) -> None:
    load = str(tmp_path)
    options = Options(load=load, save="b", target_format="hf", engines=("vllm,mlx", "openvino"))
    assert options.engine_names == ("vllm", "mlx", "openvino")
    assert codes(options.problems()) == []
    wrong = Options(load=load, save="b", target_format="hf", engines=("vlm,llama.cpp",))
    assert codes(wrong.problems()) == ["invalid-choice", "engine-format"]
    gguf = Options(load=load, save="b.gguf", target_format="gguf", engines=("llama.cpp,vllm",))
    assert codes(gguf.problems()) == ["engine-format"]
    merged = MergeOptions(load=(load, load), save="c", target_format="hf", engines=("vlm",))
    assert codes(merged.problems()) == ["invalid-choice"]


def test_only_one_line_is_reported(tmp_path: Path) -> None:
    export = export_of(source_of("bloom", tmp_path))
    problems: list[Problem] = []
    assert check_engines(export, [], problems.append) == set()
    assert codes(problems) == ["engines-differ"]
    assert check_engines(export, ["vllm"], problems.append) == set()
    assert len(problems) == 1
    with raises_problem("engine-refuses", "engines", contains="mlx-lm"):
        check_engines(export, ["mlx"], problems.append)
