"""Every key of a DeepSpeed file has a description, and every value of a run an origin."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ds.config.deepspeed_file import leaves
from megatron_ds.config.options.optimizer_specs import NAMES
from megatron_ds.config.problems import UserError
from megatron_ds.engine.ds_config.explain import (
    DERIVED,
    DESCRIPTIONS,
    FIELDS,
    TYPES,
    facts,
    find,
    known_keys,
    rows,
)
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.keys import BLOCKS, TOP_KEYS
from megatron_ds.engine.ds_config.values import KINDS
from tests.tables import tables
from tests.unit.engine.ds_files import ROOT, Merge

TABLES = tables(__file__)

GOLDEN = sorted((ROOT / "tests" / "golden" / "ds_configs").glob("*.json"))
LAYOUTS = [*TABLES["layouts"], *(f"--optimizer {name}" for name in NAMES)]


def generated_keys(merge: Merge) -> set[str]:
    """The keys of runs of all kinds."""
    configs = [merge({}, flags).config for flags in LAYOUTS]
    generated = [json.loads(path.read_text()) for path in GOLDEN]
    generated += [build_ds_config(config, 1) for config in configs]
    return {key for values in generated for key in leaves(values)}


def test_every_key_has_a_description_and_no_other_one(merge: Merge) -> None:
    """Claim (deepspeed): every key of a DeepSpeed file and of a generated configuration is
    explained"""
    supported = {f"{block}.{key}" for block, kinds in BLOCKS.items() for key in kinds}
    generated = generated_keys(merge)
    assert len(GOLDEN) == 8
    blocks = {"pipeline"}
    assert {*DESCRIPTIONS} == supported | {*TOP_KEYS} | generated | blocks
    assert {*DERIVED, *FIELDS} <= generated
    assert {*TYPES} == {*KINDS}
    assert len(set(DESCRIPTIONS.values())) > 0.85 * len(DESCRIPTIONS)
    for key, words in DESCRIPTIONS.items():
        assert words[0].isupper() or words[0] == '"', key
        assert words.endswith("."), key


@pytest.mark.parametrize(("key", "origin"), TABLES["origins"])
def test_origin_of_a_value(key: str, origin: str, merge: Merge, tmp_path: Path) -> None:
    flags = "--optimizer muon --muon-num-ns-steps 3" if origin.count("muon") else ""
    file = {"gradient_clipping": 0.5, "zero_optimization": {"stage": 3, "sub_group_size": 5}}
    config = merge({} if flags else file, flags).config
    found = {row.key: row for row in rows(config, build_ds_config(config, 1))}
    assert found[key].origin.replace(str(tmp_path / "ds.json"), "ds.json").startswith(origin)
    assert found[key].description == DESCRIPTIONS[key]
    assert all(row.description for row in found.values())


def test_name_may_be_a_key_a_block_or_the_last_part_of_a_key() -> None:
    assert find("zero_optimization.stage") == find("stage") == ["zero_optimization.stage"]
    assert find("timers.throughput")[1:] == [
        "timers.throughput.enabled",
        "timers.throughput.synchronized",
    ]
    assert len(find("pin_memory")) == 2
    with pytest.raises(UserError, match="did you mean 'gradient_clipping'"):
        find("gradient_cliping")


def test_facts_of_a_key() -> None:
    assert facts("gradient_clipping") == TABLES["facts"]
    assert facts("optimizer.params.betas")["flags"] == ["--adam-beta1", "--adam-beta2"]
    assert facts("amp")["description"].startswith("not supported: removed in DeepSpeed 0.19.8")
    assert facts("bfloat16")["description"] == "former name of bf16"
    assert all(facts(key)["description"] for key in known_keys())
