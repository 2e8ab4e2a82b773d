"""Presets: published numbers of parameters, tiny models that train, and what overrides them."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from pathlib import Path

import pytest
import torch

from megatron_ds import presets
from megatron_ds.cli.arguments import build_config
from megatron_ds.config import Config, ModelConfig, MoEConfig
from megatron_ds.config.problems import Problem
from megatron_ds.model.declaration.architecture import run_spec
from tests.problems import codes
from tests.tables import tables
from tests.unit.model.dense import build_model

TABLES = tables(__file__, tuple)

PUBLISHED = re.compile(r"# .+?: (?P<count>[\d.]+(?= billion)|[\d,]+).* parameters.*")
"""The first line of a preset."""
TINY = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 16}
SMALLER = TABLES["smaller"]
"""Tiny values of options that a preset sets."""
RUN = "--micro-batch-size 2 --lr 1e-3 --train-iters 4 --data-path x"


def built(line: str) -> tuple[Config, list[Problem]]:
    return build_config(shlex.split(line), world_size=1, warn=lambda warning: None)


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_have_the_published_number_of_parameters(preset: str) -> None:
    """Claim (command-line): every preset has the published number of parameters of its model"""
    first_line = Path(presets.path_of(preset)).read_text(encoding="utf-8").partition("\n")[0]
    published = PUBLISHED.fullmatch(first_line)
    assert published is not None
    config, problems = built(f"--preset {preset} {RUN}")
    assert codes(problems) == ["tokenizer-option-required"] * 2
    count = run_spec(config).elements()
    text = published["count"]
    assert (f"{count:,}" if "," in text else f"{count / 1e9:.1f}") == text


@pytest.mark.parametrize("preset", presets.PRESETS)
def test_presets_train_at_tiny_size(preset: str) -> None:
    """Claim (command-line): every preset trains at tiny size"""
    config, _ = built(f"--preset {preset} {RUN}")
    tiny = TINY | {name: size for name, size in SMALLER.items() if name in config.given}
    if "num_query_groups" in config.given:
        tiny["num_query_groups"] = 2
    config = config.with_values(tiny)
    losses = losses_of(config.model, config.moe)
    assert losses[-1] < 0.8 * losses[0]


@functools.cache  # presets that differ in their sizes alone are one tiny model
def losses_of(config: ModelConfig, moe: MoEConfig) -> tuple[float, ...]:
    """The losses of eight steps."""
    model = build_model(config, moe=moe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    tokens = torch.arange(34).reshape(2, 17) % 5
    losses = []
    for _ in range(8):
        loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return tuple(losses)


def test_files_and_flags_override_a_preset(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("preset: llama3-8b\nnum-layers: 4\nrotary-base: 9\n", encoding="utf-8")
    tokenizer = "--tokenizer-type NullTokenizer --vocab-size 7"
    switch = "--group-query-attention"  # requires the number of groups, which the preset has
    config, problems = built(f"--config {file} --rotary-base 10 {RUN} {tokenizer} {switch}")
    assert not problems
    assert (config.model.num_layers, config.model.rotary_base) == (4, 10)
    assert (config.model.hidden_size, config.model.vocab_size) == (4096, 7)
    same, _ = built(f"--preset llama3-8b {RUN} --num-layers 4 --rotary-base 10 {tokenizer}")
    assert dataclasses.replace(same.model) == config.model


def test_the_vocabulary_of_a_preset_yields_to_the_tokenizer() -> None:
    config, _ = built(f"--preset gpt2-124m {RUN} --vocab-file v --merge-file m")
    assert "vocab_size" not in config.given
    assert config.model.vocab_size == 0


def test_unknown_presets_are_listed() -> None:
    _, problems = built(f"--preset llama9 {RUN}")
    problem = next(problem for problem in problems if problem.code == "invalid-choice")
    assert "llama3-8b" in problem.render()
