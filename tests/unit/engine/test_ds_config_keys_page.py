"""Every key of a DeepSpeed file has a description on the page of keys."""

from __future__ import annotations

import json

from megatron_ds.config.deepspeed_file import leaves
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.keys import BLOCKS, TOP_KEYS
from megatron_ds.engine.ds_config.values import KINDS
from tests.pages.deepspeed_keys import DESCRIPTIONS, FIELDS, TYPES, flags_of_key, other_keys
from tests.unit.engine.ds_files import ROOT, Merge

GOLDEN = sorted((ROOT / "tests" / "golden" / "ds_configs").glob("*.json"))
LAYOUTS = ("--optimizer muon", "--optimizer sgd", "--pipeline-model-parallel-size 2")


def generated_keys(merge: Merge) -> set[str]:
    """The keys of runs of all kinds."""
    configs = [merge({}, flags).config for flags in LAYOUTS]
    generated = [json.loads(path.read_text()) for path in GOLDEN]
    generated += [build_ds_config(config, 1) for config in configs]
    return {key for values in generated for key in leaves(values)}


def test_every_key_has_a_description_and_no_other_one(merge: Merge) -> None:
    supported = {f"{block}.{key}" for block, kinds in BLOCKS.items() for key in kinds}
    generated = generated_keys(merge)
    assert len(GOLDEN) == 8
    blocks = {"pipeline"}
    assert {*DESCRIPTIONS} == supported | {*TOP_KEYS} | generated | blocks
    assert {*FIELDS} <= generated
    assert {*TYPES} == {*KINDS}
    assert len(set(DESCRIPTIONS.values())) > 0.85 * len(DESCRIPTIONS)
    for key, words in DESCRIPTIONS.items():
        assert words[0].isupper() or words[0] == '"', key
        assert words.endswith("."), key


def test_flags_of_a_key() -> None:
    assert flags_of_key("gradient_clipping") == ["--clip-grad"]
    assert flags_of_key("optimizer.params.betas") == ["--adam-beta1", "--adam-beta2"]
    assert other_keys()["amp"].startswith("not supported: removed in DeepSpeed 0.19.8")
    assert other_keys()["bfloat16"] == "former name of bf16"
