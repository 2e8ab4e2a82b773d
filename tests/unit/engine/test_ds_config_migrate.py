"""DeepSpeed files of earlier versions are rewritten with the same meaning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config.deepspeed_file import get, put
from megatron_ds.config.problems import UserError
from megatron_ds.engine.ds_config import history
from megatron_ds.engine.ds_config.explain import known_keys
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.keys import DEFAULTS, VERSION
from megatron_ds.engine.ds_config.migrate import Migration, migrate, text
from tests.problems import codes
from tests.tables import tables
from tests.unit.engine.ds_files import Merge

TABLES = tables(__file__)

ZERO = "zero_optimization"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "old.json"


def migrated(path: Path, values: Any, version: str | None = "0.5", **options: bool) -> Migration:
    path.write_text(json.dumps(values))
    return migrate(str(path), version, **options)


def values_of(path: Path, values: Any) -> Any:
    """The migrated file, without former defaults."""
    return migrated(path, values, new_defaults=True).values


@pytest.mark.parametrize(("old", "new"), TABLES["old_keys"])
def test_old_keys_become_current_ones(path: Path, old: Any, new: Any) -> None:
    result = values_of(path, old)
    assert {key: result[key] for key in new} == new
    assert result.keys() == (old.keys() & result.keys()) | new.keys()


@pytest.mark.parametrize(("block", "successor"), TABLES["removed_features"])
def test_removed_features_are_left_out_with_their_successor(
    path: Path, block: dict[str, Any], successor: str
) -> None:
    result = migrated(path, block, new_defaults=True)
    assert successor in "".join(map(str, result.removed))
    assert not result.values.get(next(iter(block)))


def test_blocks_that_are_off_change_nothing(path: Path) -> None:
    result = migrated(path, {"amp": {"enabled": False}, "autotuning": {"enabled": False}})
    assert codes(result.changes) == ["ds-key-dropped", "ds-key-dropped"]
    assert not result.removed


def test_curriculum_becomes_flags(path: Path) -> None:
    block = TABLES["curriculum"]
    result = migrated(path, {"curriculum_learning": block}, new_defaults=True)
    assert result.flags == ["--curriculum-seqlen 8 128 30", "--curriculum-seqlen-step 4"]
    assert result.values == {}
    block["curriculum_type"] = "loss"
    result = migrated(path, {"curriculum_learning": block})
    assert (result.flags, codes(result.removed)) == ([], ["ds-value-invalid"])


def test_unknown_keys_are_left_out_and_reported(path: Path) -> None:
    result = migrated(path, {"stepz": 1, ZERO: {"stge": 1}}, new_defaults=True)
    assert result.values == {ZERO: {}}
    assert (codes(result.changes), codes(result.unknown)) == (
        ["ds-key-dropped"],
        ["ds-key-unknown"],
    )


def test_parameters_of_a_replaced_optimizer_are_named_with_it(path: Path) -> None:
    params = {"lr": 1, "freeze_step": 9, "cuda_aware": False, "mine": 1}
    result = migrated(path, {"optimizer": {"type": "OneBitAdam", "params": params}})
    assert (codes(result.changes), codes(result.unknown)) == (
        ["ds-key-replaced"],
        ["ds-key-unknown"],
    )
    assert "OneBitAdam with optimizer.params.freeze_step, optimizer.params.cuda_aware is" in str(
        result.changes[0]
    )


def test_invalid_values_are_reported_together(path: Path) -> None:
    with pytest.raises(UserError) as error:
        migrated(path, {"steps_per_print": "ten", "optimizer": {"type": "Adagrad"}})
    assert codes(error.value.problems) == ["ds-value-invalid", "ds-value-invalid"]


@pytest.mark.parametrize(
    ("version", "clipping"), [("0.5", 0.0), ("0.19.2", 0.0), ("0.19.3", None), ("v0.19.8", None)]
)
def test_former_default_is_written_for_versions_that_had_it(
    path: Path, version: str, clipping: float | None
) -> None:
    assert migrated(path, {}, version).values.get("gradient_clipping") == clipping
    assert migrated(path, {}, version, new_defaults=True).values == {}
    given = {"gradient_clipping": 0.5}
    assert migrated(path, given, version).values == given


@pytest.mark.parametrize(("values", "version", "key", "written"), TABLES["former_defaults"])
def test_former_defaults_depend_on_the_version_and_the_file(
    path: Path, values: Any, version: str, key: str, written: Any
) -> None:
    result = migrated(path, values, version)
    assert get(result.values, key) == written
    assert (key in [one.key for one in result.meanings if one.is_written]) == (written is not None)


def test_list_of_changes_names_both_defaults_and_their_owner(path: Path) -> None:
    result = migrated(path, {"bf16": {"enabled": True}, ZERO: {"stage": 1}})
    lines = text(result, "old.json").splitlines()
    assert lines[0] == f"old.json: from DeepSpeed 0.5.0 to {VERSION}"
    (clipping,) = (line for line in lines if "gradient_clipping" in line)
    assert ": was 0.0, is 1.0 (DeepSpeed since 0.19.3): " in clipping
    assert clipping.endswith("; written as 0.0")
    (dtype,) = (line for line in lines if "- data_types.grad_accum_dtype" in line)
    assert "under ZeRO, is fp32 (megatron_ds): " in dtype
    result = migrated(path, {"csv_monitor": {}}, None, new_defaults=True)
    assert "(assumed: the first version with csv_monitor;" in text(result, "old.json")
    assert "written as" not in text(result, "old.json")


def test_default_without_a_key_is_restored_by_a_flag(path: Path) -> None:
    assert "--distributed-timeout-minutes 30 restores it" in text(migrated(path, {}), "old.json")
    assert "--distributed-timeout" not in text(migrated(path, {}, "0.19.6"), "old.json")


@pytest.mark.parametrize(("values", "version"), TABLES["versions"])
def test_version_is_the_oldest_with_all_keys(path: Path, values: Any, version: str) -> None:
    assert migrated(path, values, None).version == version


def test_key_that_is_newer_than_the_given_version_is_reported(path: Path) -> None:
    result = migrated(path, {"bf16": {"check_grad_overflow": True}}, "0.16.9")
    assert codes(result.changes) == ["ds-key-is-newer"]
    assert not migrated(path, {"bf16": {"check_grad_overflow": True}}, "0.17").changes


@pytest.mark.parametrize("version", ["0.4.5", "0.20", "0.19.9", "nine", "0", "0.9.2.1", "-0.9"])
def test_other_versions_are_rejected(path: Path, version: str) -> None:
    with pytest.raises(UserError) as error:
        migrated(path, {}, version)
    assert codes(error.value.problems) == ["unknown-deepspeed-version"]


def test_auto_is_kept_and_reported(path: Path) -> None:
    values = {"gradient_clipping": "auto", "fp16": {"enabled": "auto", "loss_scale": 8}}
    result = migrated(path, values)
    assert result.values == values
    assert result.auto == ["gradient_clipping", "fp16.enabled"]


def test_newest_former_default_is_that_of_the_installed_deepspeed() -> None:
    """Claim (deepspeed): former defaults end with those of the installed DeepSpeed, and present
    ones are those of a run"""
    known = [former for former in history.FORMER if former.key in DEFAULTS]
    assert len(known) >= 9
    for former in known:
        assert [*former.values.values()][-1] == DEFAULTS[former.key], former.key
        assert [*former.values] == sorted(former.values, key=history.as_version)


def test_present_default_is_that_of_a_run(merge: Merge) -> None:
    """Of keys that a file can set, in a run that all conditions of the entry hold for.

    Claim (deepspeed): former defaults end with those of the installed DeepSpeed, and present ones
    are those of a run
    """
    flags = TABLES["flags"]
    for former in history.FORMER:
        if former.keep:
            config = merge({}, flags.get(former.key, ""), without="--weight-decay 0.1").config
            generated = build_ds_config(config, 1, "an accelerator")
            assert get(generated, former.key) == former.here, former.key


def test_keys_of_the_tables_are_known() -> None:
    since = [key for keys in history.TABLES["since"].values() for key in keys]
    named = [former.key for former in history.FORMER if not former.flag]
    assert {*since, *named, *history.REPLACED, *history.REPLACED.values()} <= {*known_keys()}


def test_put_creates_the_blocks_of_a_key() -> None:
    values: dict[str, Any] = {"a": 1}
    put(values, "b.c.d", 2)
    assert values == {"a": 1, "b": {"c": {"d": 2}}}
