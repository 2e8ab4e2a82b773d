"""The generated pages document what the code declares."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.cli.flags import training_flags
from megatron_ds.cli.help import other_names
from tests import import_graph
from tests.pages import (
    changes,
    deepspeed_keys,
    engines,
    families,
    flags,
    measured,
    plan_example,
    recipes,
    support_matrix,
    verified,
)

PAGES = [
    flags,
    support_matrix,
    deepspeed_keys,
    changes,
    engines,
    import_graph,
    families,
    plan_example,
    measured,
    recipes,
    verified,
]


@pytest.mark.parametrize("module", PAGES)
def test_pages_are_current(module: ModuleType) -> None:
    """Regenerate with `python -m tests.pages`."""
    assert module.OUTPUT.read_text(encoding="utf-8") == module.page()


@pytest.mark.parametrize("path", recipes.recipes(), ids=lambda path: path.stem)
def test_recipes_have_their_plan_and_start_with_the_tiny_file(path: Path) -> None:
    """Claim (command-line): the recipes of [examples/recipes](../../examples/recipes/README.md)
    have the memory and time that the plan gives them in their first lines"""
    assert path.read_text(encoding="utf-8") == recipes.text(path)
    line = ["--config", str(path), str(recipes.TINY)]
    config, problems = build_config(line, world_size=1, warn=lambda _: None)
    assert problems == []
    assert (config.model.num_layers, config.schedule.train_iters) == (2, 4)


def test_flags_page_lists_every_flag() -> None:
    """Flags of the tools and all spellings as well, so that a new flag changes the page."""
    page = flags.page()
    tools = (flag for table in flags.tool_tables().values() for flag in table.by_name.values())

    for flag in (*training_flags().by_name.values(), *tools):
        for name in (flag.names[0], *other_names(flag)):
            assert f"`--{name}`" in page or f"`--{name} " in page or flag.positional, name
