"""Programs by the names that they have in other projects."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.proofs.cases import with_proofs

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = {
    "pretrain_llama.py": "pretrain_gpt.py",
    "pretrain_gpt_alcf.py": "pretrain_gpt.py",
    "tools/generate_samples_gpt2.py": "tools/generate_samples_gpt.py",
    "tools/merge_preprocessed_data.py": "tools/merge_datasets.py",
    "tools/checkpoint/util.py": "tools/start_tool.py",
    "tasks/eval_harness/evaluate.py": "tools/evaluate.py",
    "tasks/main.py": "tools/evaluate.py",
}
SHOWN_NAMES = {
    **dict.fromkeys(("tasks/eval_harness/evaluate.py", "tasks/main.py"), "evaluate.py"),
    "tools/checkpoint/util.py": "convert.py",
    "pretrain_llama.py": "pretrain_gpt.py",
    "pretrain_gpt_alcf.py": "pretrain_gpt.py",
}
"""Names in the help that are not the link's."""
STARTED = {"pretrain_llama.py", "tools/checkpoint/util.py", "tasks/main.py"}
"""One in each folder."""


def test_other_names_are_links_to_the_programs() -> None:
    for name, program in NAMES.items():
        assert (REPOSITORY / name).resolve() == REPOSITORY / program


@pytest.mark.parametrize("name", with_proofs(NAMES, NAMES.keys() - STARTED))
def test_a_program_starts_by_its_other_name(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, REPOSITORY / name, "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    shown = SHOWN_NAMES.get(name, Path(name).name)
    usage, _, _ = done.stdout.partition("\n")
    assert usage.startswith("usage: ")
    assert usage.endswith(f" {shown} FLAGS")


def test_each_link_to_the_start_of_programs_has_one() -> None:
    tools = REPOSITORY / "tools"
    names = tomllib.loads((tools / "other_names.toml").read_text())
    start = tools / "start_tool.py"
    links = {
        path.name for path in tools.rglob("*.py") if path.is_symlink() and path.resolve() == start
    }
    assert links == {*names, start.name}
    assert all(callable(pkgutil.resolve_name(options).run) for options in names.values())


def test_flags_of_the_harness_of_the_forks_are_known() -> None:
    from megatron_ds.cli.command import table_of
    from megatron_ds.cli.scan import scan
    from megatron_ds.evaluation.options import Options
    from tests.problems import codes

    line = "--task_list arc_easy,lambada --results_path out.json --num_fewshot 0 --adaptive_seq_len"
    found = scan(line.split(), table_of(Options))
    expected = {"tasks": ("arc_easy,lambada",), "output": "out.json", "num_fewshot": 0}
    assert (found.values, found.problems) == (expected, [])
    assert codes(found.warnings) == ["ignored-flag"]
