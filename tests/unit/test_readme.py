"""The README's claims and commands are kept true."""

from __future__ import annotations

import ast
import fnmatch
import re
import shlex
from pathlib import Path

import pytest

from megatron_ds.cli import arguments

REPOSITORY = Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def rows() -> list[str]:
    """The second column of the table under "What works"."""
    section = README.split("## What works")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [line.split("|")[2].strip().strip("`") for line in lines[1:]]


def found_in(path: Path) -> set[str]:
    """The tests that pytest finds in a file; none if it does not look into the file."""
    if not fnmatch.fnmatch(path.name, "test_*.py"):
        return set()
    return {
        node.name
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


def test_the_table_has_rows() -> None:
    assert len(rows()) > 10


@pytest.mark.parametrize("row", rows())
def test_each_row_of_what_works_names_a_test(row: str) -> None:
    file, _, name = row.partition("::")
    found = found_in(REPOSITORY / file)

    assert found
    assert not name or name in found


def commands() -> list[list[str]]:
    blocks = re.findall(r"```\n(.*?)```", README, flags=re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines]


def test_every_file_that_a_command_runs_exists() -> None:
    scripts = {word for words in commands() for word in words if word.endswith(".py")}

    assert {"pretrain_gpt.py", "tools/preprocess_data.py"} <= scripts
    for script in scripts:
        assert (REPOSITORY / script).is_file(), script


def test_every_make_target_exists() -> None:
    makefile = (REPOSITORY / "Makefile").read_text()
    targets = {words[1] for words in commands() if words[:1] == ["make"]}

    assert targets == {"demo", "test"}
    named = set(re.findall(r"`make ([a-z-]+)", README))
    assert "test-interop" in named
    for target in targets | named:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE)


def test_the_real_run_parses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data/my_text_document.bin", "data/my_text_document.idx", "tokenizer/vocab.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "tokenizer" / "merges.txt").touch()
    monkeypatch.chdir(tmp_path)
    (words,) = [words for words in commands() if "--num-layers" in words]

    config = arguments.parse(words[words.index("pretrain_gpt.py") + 1 :], world_size=8)

    assert config.parallel.tensor_model_parallel_size == 2
    assert config.given >= {"train_iters", "zero_stage"}
