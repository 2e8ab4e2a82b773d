"""Programs by the names that they have in other projects."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
NAMES = {
    "pretrain_llama.py": "pretrain_gpt.py",
    "pretrain_gpt_alcf.py": "pretrain_gpt.py",
    "tools/generate_samples_gpt2.py": "tools/generate_samples_gpt.py",
    "tools/merge_preprocessed_data.py": "tools/merge_datasets.py",
    "tools/checkpoint/util.py": "tools/checkpoint/convert.py",
    "tasks/eval_harness/evaluate.py": "tools/evaluate.py",
    "tasks/main.py": "tools/evaluate.py",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_program_has_its_other_name(name: str, tmp_path: Path) -> None:
    assert (REPOSITORY / name).resolve() == REPOSITORY / NAMES[name]
    done = subprocess.run(
        [sys.executable, REPOSITORY / name, "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.startswith("usage: ")
    assert "FLAGS" in done.stdout


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
