"""Keys of config.json in published models are in exports, too, or a table says why not."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_ds.conversion.huggingface.families import FAMILIES
from megatron_ds.conversion.huggingface.read_write import write_hf
from megatron_ds.conversion.json_files import read_json
from megatron_ds.conversion.weights_locations import HF_CONFIG
from tests.tables import tables
from tests.unit.conversion.hf_models import MODELS
from tests.unit.conversion.test_gguf import source_of

TABLES = tables(__file__)
PUBLISHED: dict[str, dict[str, str]] = TABLES["published"]
LEFT_OUT: dict[str, dict[str, str]] = TABLES["left_out"]
REQUIRED: dict[str, dict[str, Any]] = TABLES["required"]
SHAPES = {"falcon": "falcon-parallel", "gpt_neox": "pythia", "gemma3_text": "gemma3"}
"""Models whose names are not those of their families."""


def written_config(family: str, folder: Any) -> dict[str, Any]:
    """The config.json of an export of a family's model."""
    source = source_of(SHAPES.get(family, family.replace("_", "-")), folder)
    write_hf(source, folder / "export")
    return dict(read_json(folder / "export" / HF_CONFIG))


def is_left_out(key: str, family: str) -> bool:
    entry = LEFT_OUT.get(key)
    return entry is not None and family in entry.get("families", family).split()


@pytest.mark.parametrize("family", FAMILIES)
def test_exports_have_the_keys_of_published_files(family: str, tmp_path: Any) -> None:
    """Claim (conversion): the config.json of an export has each key of a published model of its
    family, except for those of which a table says why not, and those that engines require
    """
    config = written_config(family, tmp_path)
    keys = set(PUBLISHED[family]["keys"].split())
    assert {key for key in keys - config.keys() if not is_left_out(key, family)} == set()
    assert {key for key in config if is_left_out(key, family)} == set()
    required = REQUIRED.get(family, {})
    assert {key: config.get(key) for key in required} == required


def test_every_reason_is_of_a_published_key() -> None:
    for key, entry in LEFT_OUT.items():
        families = entry.get("families", " ".join(FAMILIES)).split()
        assert any(key in PUBLISHED[family]["keys"].split() for family in families), key
        assert entry["why"]
    assert PUBLISHED.keys() == FAMILIES.keys()
    assert {CONFIG_MAPPING[family].model_type for family in FAMILIES} == FAMILIES.keys()
    assert {*SHAPES.values()} <= MODELS.keys()
