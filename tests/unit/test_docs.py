"""What the pages under docs/ say: their links lead somewhere, their commands are read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.cli.flags import dashed, training_flags
from tests.problems import codes

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted([REPOSITORY / "README.md", *(REPOSITORY / "docs").glob("*.md")])
COMING = REPOSITORY / "docs" / "migration.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in [title.lower().replace(" ", "-") for title in titles], link


def test_the_forks_command_line_starts_as_it_is() -> None:
    text = COMING.read_text(encoding="utf-8")
    (command,) = re.findall(r"```\n(deepspeed .*?)```", text, flags=re.DOTALL)
    words = shlex.split(command.replace("\\\n", " "))
    said: list[str] = []

    _, problems = build_config(
        words[words.index("pretrain_gpt.py") + 1 :], world_size=8, warn=said.append
    )

    assert [line.split()[0] for line in said] == ["--use-flash-attn-v2"]
    assert set(codes(problems)) == {"file-not-found"}


def test_the_flags_that_the_page_names_exist() -> None:
    others = {"--num_gpus", "--json-key", "--vocab", "--world-size", "--override-"}
    for name in re.findall(r"--[a-z][\w-]*", COMING.read_text(encoding="utf-8")):
        assert name in others or dashed(name) in training_flags().by_name, name
