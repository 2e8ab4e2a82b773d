"""Training commands of Megatron-LM, its forks and their users: each starts as it was meant, or is
refused for a reason that docs/start/migration.md lists.

`tests/golden/commands.json` has the flags and the DeepSpeed file of each command, with placeholders
for paths, and the facts of the run by the rules of the project that the command is from.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config
from megatron_ds.config.problems import Problem
from megatron_ds.engine.ds_config.generate import build_ds_config
from megatron_ds.engine.ds_config.merge import merge_file
from megatron_ds.model.declaration.architecture import model_spec

REPOSITORY = Path(__file__).resolve().parents[3]
COMMANDS: list[dict[str, Any]] = json.loads(
    (REPOSITORY / "tests" / "golden" / "commands.json").read_text("utf-8")
)
PLACEHOLDER = re.compile(r"@([A-Z]+)(\d*)@")
GPT2_SIZE = 50257
SPLITS = '"part: 0.6 0:0.95 one, 0.4 0:0.95 two"\n'


def table_of_reasons() -> dict[str, tuple[set[str], int]]:
    """Words of the problems and number of commands, by reason, of the page's table."""
    page = (REPOSITORY / "docs" / "start" / "migration.md").read_text("utf-8")
    rows = re.findall(r"^\| ([a-z ]+) \| (.*`.*) \| (\d+) \|$", page, re.MULTILINE)
    return {name: (set(re.findall(r"`([^`]+)`", words)), int(count)) for name, words, count in rows}


REASONS = table_of_reasons()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that flags name, without content where nothing reads it."""
    folder = tmp_path_factory.mktemp("commands")
    for name in ("VOCAB", "MERGES", "SP", "VOCAB131072"):
        (folder / name).touch()
    for size in {size for each in COMMANDS for _, size in PLACEHOLDER.findall(each["flags"])}:
        (folder / f"HF{size}").mkdir(exist_ok=True)
        (folder / f"HF{size}" / "tokenizer.json").write_text("{}")
    for split in ("TRAIN", "VALID"):
        (folder / f"{split}SPLITS").write_text(SPLITS.replace("part", split.lower()))
    (folder / "LIST").write_text("1.0 one\n")
    return folder


def read(command: dict[str, Any], folder: Path) -> tuple[Config, list[Problem]]:
    """The configuration of a command, with its vocabulary, and the problems."""
    if command["ds"] is not None:
        (folder / "DS").write_text(json.dumps(command["ds"], indent=1))
    found = PLACEHOLDER.findall(command["flags"])
    sizes = {int(size) for name, size in found if size and name in ("HF", "SP", "VOCAB")}
    flags = PLACEHOLDER.sub(
        lambda name: str(folder / (name[1] if name[1] == "SP" else f"{name[1]}{name[2]}")),
        command["flags"],
    )
    config, problems = build_config(
        shlex.split(flags), world_size=command["world"], warn=lambda _: None, complete=merge_file
    )
    given = config.model.vocab_size + 1 if config.model.vocab_size else GPT2_SIZE
    return config.with_vocab(max(sizes, default=given)), problems


def facts_of(config: Config, world_size: int) -> dict[str, Any]:
    parallel = config.parallel
    dp_size = parallel.data_parallel_size(world_size)
    tp_size = parallel.tensor_model_parallel_size
    ds_config = build_ds_config(config, dp_size)
    unit = math.lcm(config.model.make_vocab_size_divisible_by, tp_size)
    model = config.with_values({"make_vocab_size_divisible_by": unit}).model
    return {
        "parameters": model_spec(model, config.moe).elements(),
        "axes.tp": tp_size,
        "axes.pp": parallel.pipeline_model_parallel_size,
        "axes.sp": parallel.sequence_ranks,
        "dp_total": dp_size,
        "samples_per_step": config.final_global_batch_size(dp_size),
        "precision": config.precision.name,
        "ds.zero_optimization.stage": ds_config["zero_optimization"]["stage"],
        "ds.fp16.loss_scale": ds_config["fp16"]["loss_scale"],
        "ds.gradient_clipping": ds_config["gradient_clipping"],
    }


@pytest.mark.parametrize(
    "command",
    COMMANDS,
    ids=[f"{n}: {command['sources'][0][-60:]}" for n, command in enumerate(COMMANDS)],
)
def test_command_starts_as_it_was_meant_or_is_refused_for_a_listed_reason(
    command: dict[str, Any], folder: Path
) -> None:
    config, problems = read(command, folder)
    if reason := command.get("refused"):
        words = REASONS[reason][0]
        assert any(word in problem.render() for problem in problems for word in words), problems
        return
    assert problems == []
    facts = facts_of(config, command["world"])
    expected = dict(command["facts"])
    if "parameters" in expected:
        # The projects pad the vocabulary by other multiples.
        assert facts["parameters"] == pytest.approx(expected.pop("parameters"), rel=5e-3)
    assert {name: facts[name] for name in expected} == expected


def test_the_page_counts_the_commands() -> None:
    counts: Counter[str] = Counter()
    for command in COMMANDS:
        counts[command.get("refused", "")] += len(command["sources"])
    assert {name: count for name, (_, count) in REASONS.items()} == {
        name: count for name, count in counts.items() if name
    }
    page = (REPOSITORY / "docs" / "start" / "migration.md").read_text("utf-8")
    assert f"Of {counts.total()} training commands" in page
    assert f"{counts['']} start" in page


@pytest.mark.parametrize(
    ("shape", "experts", "billions"),
    [((12, 768, 12), 64, 1.91), ((24, 1024, 16), 128, 13.15), ((24, 2048, 16), 128, 52.5)],
)
def test_experts_of_microsofts_fork_have_their_published_number_of_parameters(
    shape: tuple[int, int, int], experts: int, billions: float
) -> None:
    layers, hidden, heads = shape
    line = (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --lr 1e-4 "
        f"--seq-length 2048 --micro-batch-size 4 --train-iters 9 --data-path x --num-experts "
        f"{experts} --moe-expert-parallel-size 64 --moe-loss-coeff 0.01"
    )
    config, _ = build_config(line.split(), world_size=64, warn=lambda _: None)
    count = model_spec(config.with_vocab(GPT2_SIZE).model, config.moe).elements()
    assert count / 1e9 == pytest.approx(billions, rel=3e-3)
