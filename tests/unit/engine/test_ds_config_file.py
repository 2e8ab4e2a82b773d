"""DeepSpeed files: unknown, old, unsupported and invalid keys."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.config import deepspeed_file
from megatron_ds.config.checks import json_remedy
from megatron_ds.config.deepspeed_file import leaves
from megatron_ds.config.problems import UserError
from megatron_ds.engine.ds_config.file import _key_lines, parse_file
from megatron_ds.engine.ds_config.generate import (
    ZERO3_DEFAULTS,
    ZERO12_DEFAULTS,
    ZERO_DEFAULTS,
    build_ds_config,
)
from megatron_ds.engine.ds_config.keys import (
    BLOCKS,
    IGNORED_KEYS,
    OLD_PIN_KEY,
    OLD_SWITCHES,
    REFUSED,
    RENAMED,
    TOP_KEYS,
)
from tests.problems import codes, raises_problem
from tests.tables import tables
from tests.unit.engine.ds_files import ROOT, Merge
from tests.versions import make_ds_keys

TABLES = tables(__file__)


@pytest.mark.parametrize(("file", "code", "shown"), TABLES["wrong_keys"])
def test_wrong_key_is_reported(merge: Merge, file: object, code: str, shown: str) -> None:
    problem = next(problem for problem in merge(file).problems if problem.code == code)
    assert "ds.json:1: " in str(problem)
    assert shown in str(problem)


@pytest.mark.parametrize(("text", "line"), TABLES["invalid_json"])
def test_comment_or_trailing_comma_is_located(text: str, line: int | None) -> None:
    with pytest.raises(json.JSONDecodeError) as raised:
        json.loads(text)
    remedy = json_remedy(raised.value)
    assert re.findall(r"line (\d+)", remedy) == ([] if line is None else [str(line)])


@pytest.mark.parametrize(("file", "key"), TABLES["ignored_keys"])
def test_key_that_deepspeed_does_not_read_is_ignored_with_a_warning(
    merge: Merge, file: Any, key: str
) -> None:
    config, problems, warnings = merge(file)
    assert (problems, codes(warnings)) == ([], ["ds-key-dropped"])
    assert f"{key} has no effect" in str(warnings[0])
    assert "did you mean" not in str(warnings[0])  # which would be an error
    assert build_ds_config(config, 2) == build_ds_config(merge({}).config, 2)


HJSON = """\ufeff{ // "fp16": {
  # Hugging Face's "auto"
  "train_micro_batch_size_per_gpu": 2, /* "bf16": {
  */ "bf16": {"enabled": true,},
  'zero_optimization': {
     stage: 3  # no comma
     offload_param: {device: nvme // a text ends with its line
       },
     "stge": 1, "reduce_bucket_size": 2e8,
  },
  "optimizer":
    {"params": {"betas": [0.8, 0.9,], "eps"
      : -1e-6}}, gradient_clipping: 0.5,
}"""


def test_file_is_read_as_deepspeed_reads_it(tmp_path: Path) -> None:
    """Claim (deepspeed): DeepSpeed files are read in Hjson, with the lines of their keys; keys that
    DeepSpeed does not read have no effect, and all that it reads are known"""
    import hjson

    path = tmp_path / "ds.json"
    path.write_text(HJSON, encoding="utf-8")
    file = parse_file(str(path))
    assert file.values == hjson.loads(HJSON)
    assert file.values["zero_optimization"]["offload_param"]["device"].startswith("nvme //")
    lines = {key: file.lines[key] for key in leaves(file.values)}
    assert list(lines.values()) == [3, 4, 6, 7, 9, 9, 12, 12, 13]
    lines = {key: file.lines[key] for key in ("bf16", "optimizer", "zero_optimization")}
    assert list(lines.values()) == [4, 11, 5]


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_file_with_byte_order_mark_keeps_its_numbers(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "ds.json"
    path.write_bytes(f'\ufeff{{{ending}"a": {{"b":{ending} 2.0}}}}'.encode())
    file = parse_file(str(path))
    assert (json.dumps(file.values), file.lines) == ('{"a": {"b": 2.0}}', {"a": 2, "a.b": 2})


@pytest.mark.parametrize(
    ("name", "text", "syntax"),
    [
        ("ds.toml", "[zero_optimization]\nstage = 1\n", "TOML"),
        ("ds.json", "# a\ntrain_batch_size = 4\n", "TOML"),
        ("ds.json", "zero_optimization:\n  stage: 1\n", "YAML"),
        ("ds.json", "zero_optimization:  # a\n\n  stage: 1\n", "YAML"),
        ("ds.json", "---\ntrain_batch_size: 4\n", "YAML"),
        ("ds.yaml", "train_batch_size: 4\n", "YAML"),
        ("ds.py", "ds = {}\n", "Python"),
    ],
)
def test_a_file_in_the_syntax_of_another_is_named(
    tmp_path: Path, name: str, text: str, syntax: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with raises_problem("ds-config-of-other-syntax", "deepspeed_config", contains=f"in {syntax}"):
        parse_file(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "train_batch_size: 4\nfp16: {enabled: true}\n",
        "fp16:\n{\n  enabled: true\n}\n",
        "# a\n{\n  fp16:\n    {enabled: true}\n}\n",
    ],
)
def test_hjson_is_read_as_deepspeed_does(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    assert parse_file(str(path)).values["fp16" if "fp16" in text else "train_batch_size"]


@pytest.mark.parametrize("key", ["num-layers", "seq_length", "data_path"])
def test_settings_of_the_run_are_for_another_flag(tmp_path: Path, key: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(f'{{"{key}": 4}}')
    with raises_problem("ds-config-has-flags", "deepspeed_config", contains="--config"):
        parse_file(str(path))


@pytest.mark.parametrize(("text", "place"), TABLES["unreadable"])
def test_unreadable_file_is_reported_with_its_place(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(UserError) as raised:
        parse_file(str(path))
    (problem,) = raised.value.problems
    assert problem.code == "ds-config-unreadable"
    assert f"{path}:{place}" in str(problem)


def test_comments_do_not_change_the_lines_of_other_files() -> None:
    """Of valid JSON, the lines are those of its keys, whatever is around them."""
    text = (ROOT / "examples" / "deepspeed_config.json").read_text()
    commented = re.sub(r"(\n *)(\"|\})", r"\1/* , { \" */ \2", text)
    assert commented != text
    assert _key_lines(commented) == _key_lines(text)
    assert _key_lines(text.replace("\n", "# : }\n")) == _key_lines(text)


class Recording(dict[str, Any]):
    """An object of a file that notes the dotted keys that are read."""

    def __init__(self, values: dict[str, Any], prefix: str, read: set[str]) -> None:
        super().__init__(values)
        self._prefix = prefix
        self._read = read

    def __contains__(self, key: object) -> bool:
        self._read.add(f"{self._prefix}{key}")
        return super().__contains__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(f"{self._prefix}{key}")
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __copy__(self) -> Recording:
        return self


def test_every_key_that_deepspeed_reads_is_known() -> None:
    """The keys of blocks that are pydantic models are in the generated table.

    Claim (deepspeed): DeepSpeed files are read in Hjson, with the lines of their keys; keys that
    DeepSpeed does not read have no effect, and all that it reads are known
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    read: set[str] = set()
    blocks = "optimizer scheduler activation_checkpointing aio flops_profiler data_types checkpoint"
    file = {name: Recording({}, f"{name}.", read) for name in (*blocks.split(), "timers")}
    DeepSpeedConfig(Recording({"train_batch_size": 1, **file}, "", read))
    known = set(TOP_KEYS) | {f"{block}.{key}" for block, keys in BLOCKS.items() for key in keys}
    assert len(read) > 80
    assert read <= known | {*REFUSED, *IGNORED_KEYS, *RENAMED, *OLD_SWITCHES}


@pytest.mark.parametrize(("file", "key", "value"), TABLES["old_keys"])
def test_old_key_is_translated_with_a_warning(
    merge: Merge, file: object, key: str, value: object
) -> None:
    config, problems, warnings = merge(file)
    assert problems == []
    assert set(codes(warnings)) == {"ds-old-key"}
    assert deepspeed_file.get(build_ds_config(config, 2), key) == value


@pytest.mark.parametrize("file", TABLES["unsupported_keys_that_are_off"])
def test_unsupported_key_that_is_off_is_dropped_with_a_warning(merge: Merge, file: Any) -> None:
    config, problems, warnings = merge(file)
    assert (problems, codes(warnings)) == ([], ["ds-key-dropped"])
    assert deepspeed_file.get(build_ds_config(config, 2), next(iter(file))) in (
        None,
        {},
        build_ds_config(merge({}).config, 2).get(next(iter(file))),
    )


def test_legacy_file_is_translated(merge: Merge) -> None:
    """A file of 2020, without batch sizes."""
    config, problems, warnings = merge((ROOT / "examples" / "deepspeed_config.json").read_text())
    assert problems == []
    assert (config.precision.fp16, config.zero_stage) == (True, 3)
    assert config.deepspeed.cpu_optimizer
    zero = build_ds_config(config, 2)["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "cpu", "pin_memory": False, "ratio": 1.0}
    assert (zero["reduce_bucket_size"], zero["overlap_comm"]) == (2e8, True)
    assert "cpu_offload" not in zero
    assert codes(warnings) == ["ds-old-key", "ds-keys-ineffective"]
    assert ["ds.json:13" in str(warnings[0]), "ds.json:7" in str(warnings[1])] == [True, True]
    assert "allgather_bucket_size" in str(warnings[1])


def test_problem_shows_line_of_its_key(merge: Merge) -> None:
    """Blocks share the names of their keys, and strings may look like keys."""
    problems = merge(
        """{
  "tensorboard": {"job_name": "\\"stge\\": {", "output_path": "x"},
  "comms_logger": {"prof_ops": ["stge", {"stge": 1}]},
  "fp16": {"enabled": false},
  "bf16": {
    "enabled": 7
  },
  "zero_optimization": {"stage": 1,
    "stge": 2}
}"""
    ).problems
    found = {problem.code: str(problem).split("ds.json:")[1].split(":")[0] for problem in problems}
    assert found == {"ds-key-unknown": "9", "ds-value-invalid": "6"}


def test_every_key_has_one_treatment() -> None:
    known = set(TOP_KEYS) | {f"{block}.{key}" for block, keys in BLOCKS.items() for key in keys}
    assert not known & {*REFUSED, *RENAMED, *OLD_SWITCHES, *IGNORED_KEYS, OLD_PIN_KEY}
    assert set(RENAMED.values()) <= known
    assert {new for new, _ in OLD_SWITCHES.values()} <= known
    defaults = ZERO_DEFAULTS | ZERO12_DEFAULTS | ZERO3_DEFAULTS
    assert defaults.keys() <= BLOCKS["zero_optimization"].keys()


def test_key_table_is_current_for_installed_deepspeed() -> None:
    """`python tests/versions/make_ds_keys.py` rewrites it."""
    assert json.loads(make_ds_keys.OUTPUT.read_text()) == make_ds_keys.keys()


def test_deprecated_keys_of_deepspeed_models_are_translated() -> None:
    translated = {*RENAMED, *OLD_SWITCHES, OLD_PIN_KEY, *REFUSED}
    for block, model in make_ds_keys.models().items():
        for name, field in model.model_fields.items():
            key = f"{block}.{field.alias or name}"
            assert (
                key in translated
                or key.rpartition(".")[2] in {*BLOCKS[block]}
                or (key in IGNORED_KEYS)
            )


def test_keys_that_deepspeed_has_removed_are_refused() -> None:
    from deepspeed.runtime import config as theirs

    removed = set(theirs._REMOVED_TOP_LEVEL_CONFIG_KEYS)
    removed |= {f"zero_optimization.{key}" for key in theirs._REMOVED_ZERO_CONFIG_KEYS}
    assert removed <= REFUSED.keys() | {"curriculum_learning"}  # which is translated
