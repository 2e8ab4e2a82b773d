"""Tables of cases: a second case with a name, which would hide the first one, is an error."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.tables import UniqueNames, parse_tables, tables


@pytest.mark.parametrize("text", ["cases: {a: 1, b: 2, a: 1}", "a: {x: {b: 1}}\na: {y: {b: 2}}"])
def test_a_repeated_key_of_a_table_is_an_error(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match="the key 'a'"):
        parse_tables(text)


def test_a_repeated_name_of_a_row_is_an_error() -> None:
    rows = "cases: [{name: one, size: 1}, {name: two, size: 1}, {name: %s, size: 2}]"
    assert len(parse_tables(rows % "three")["cases"]) == 3
    with pytest.raises(ValueError, match="'one'"):
        parse_tables(rows % "one")


def test_a_table_reads_as_yaml_does(tmp_path: Path) -> None:
    text = "base: &base {a: 1, b: [1, 2]}\nmore: {<<: *base, a: 2}\n"
    (tmp_path / "test_x.yaml").write_text(text)
    assert tables(str(tmp_path / "test_x.py")) == yaml.safe_load(text)
    assert tables(str(tmp_path / "test_x.py"), tuple)["more"] == {"a": 2, "b": (1, 2)}


def test_names_of_collected_cases_are_unique() -> None:
    cases = UniqueNames({"a": 1})
    cases |= [("b", 2)]
    cases["c"] = 3
    cases.setdefault("c", 4)
    assert cases == {"a": 1, "b": 2, "c": 3}
    with pytest.raises(ValueError, match="'a'"):
        cases["a"] = 1
    with pytest.raises(ValueError, match="'b'"):
        cases |= {"b": 2}
    with pytest.raises(ValueError, match="'x'"):
        UniqueNames([("x", 1), ("x", 1)])


def test_names_of_parameters_are_unique(pytestconfig: pytest.Config) -> None:
    """pytest would number equal names, and what the parameters share by name runs once."""
    assert pytestconfig.getini("strict_parametrization_ids")
