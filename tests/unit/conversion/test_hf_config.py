"""config.json: what is read, against what transformers' configuration class and model hold."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megatron_ds.config.problems import UserError
from megatron_ds.conversion.huggingface import families
from megatron_ds.conversion.huggingface.families import FAMILIES
from megatron_ds.conversion.huggingface.read_config import read_settings
from megatron_ds.conversion.huggingface.read_write import open_hf
from megatron_ds.conversion.huggingface.standard_values import OF_MODELS, ONLY, WITHOUT_EFFECT
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.weights_locations import HF_CONFIG
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.position_embedding import rope_rates
from tests.proofs.cases import rotated, with_proofs
from tests.tables import tables
from tests.unit.conversion.hf_models import EAGER, MODELS, VOCAB, logits_of, randomize
from tests.unit.conversion.models import logits

TABLES = tables(__file__)
DEVICE = torch.device("cpu")
TOKENS = torch.randint(0, VOCAB, (1, 40), generator=torch.Generator().manual_seed(4))
WITHOUT_ROPE = ("gpt2", "bloom", "gptj")
ROTARY_FOLDER = {"gemma3_text": "gemma3"}
PARTS = 4
"""Of the variants; `make test` has one part of each family, and each variant of some families."""


def base_values(model_type: str) -> dict[str, Any]:
    """The keys of a small model, without rotary parameters."""
    config_class = CONFIG_MAPPING[model_type].__name__
    arguments = next(values for name, values in MODELS.values() if name == config_class)
    values = {
        key: copy.deepcopy(TABLES["sizes"].get(key, value))
        for key, value in arguments.items()
        if not key.startswith("rope_")
    }
    values.pop("layer_types", None)
    if model_type == "deepseek_v3":
        values["num_key_value_heads"] = values["num_attention_heads"]
    return {"model_type": model_type, **values}


def variants(model_type: str) -> Iterator[dict[str, Any]]:
    """Changed keys of a config.json."""
    yield from TABLES["any"]
    if model_type not in WITHOUT_ROPE:
        yield from TABLES["rope"]


def config_of_transformers(folder: Path) -> Any:
    """The configuration with which a model is built, or None if transformers refuses the file."""
    with contextlib.suppress(Exception):
        config = transformers.AutoConfig.from_pretrained(folder)
        if hasattr(config, "rope_parameters"):
            config.standardize_rope_params()  # as every rotary embedding with scaling does
            rotations(config)
        return config
    return None


def keys_in(changes: Any) -> set[str]:
    """The names in some values."""
    if isinstance(changes, dict):
        return {*changes}.union(*map(keys_in, changes.values()))
    return {changes} if isinstance(changes, str) else set()


def described(folder: Path, changes: dict[str, Any]) -> ModelSettings | None:
    """The settings that are read; None if they are refused by the name of a changed key."""
    text = ""
    try:
        return read_settings(folder).settings
    except UserError as error:
        text = str(error)
    assert any(key in text for key in keys_in(changes)), text
    return None


def rotations(config: Any) -> list[tuple[torch.Tensor, float]]:
    """Rates of rotation and amplitude of each layer."""
    folder = ROTARY_FOLDER.get(config.model_type, config.model_type)
    module = importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")
    name = next(name for name in dir(module) if name.endswith("RotaryEmbedding"))
    rotary = getattr(module, name)(config)
    layers = range(config.num_hidden_layers)
    if isinstance(rotary.rope_type, dict):
        types = [config.layer_types[layer] for layer in layers]
        return [
            (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"))
            for kind in types
        ]
    return [(rotary.inv_freq, rotary.attention_scaling) for _ in layers]


def assert_rotations(config: Any, settings: ModelSettings) -> None:
    lacking = settings.model.rope_layers["no_rope_freq"]
    expected = rotations(config)
    for rule, lacks, (rates, amplitude) in zip(
        attention_rules(settings.model)[: len(lacking)], lacking, expected, strict=True
    ):
        assert (rule.rope is None) == lacks
        if rule.rope is not None:
            torch.testing.assert_close(rope_rates(rule.rope, DEVICE), rates, rtol=1e-5, atol=0)
            scaling = rule.rope.scaling
            found = getattr(scaling, "amplitude", 1.0)
            assert found == pytest.approx(amplitude, rel=1e-9)


def expected_windows(config: Any) -> tuple[int | None, ...]:
    layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    if config.model_type in ("mistral", "mixtral", "phi3"):
        return (window,) * layers
    types = getattr(config, "layer_types", None) or ["full_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def assert_same(config: Any, settings: ModelSettings) -> None:
    """The values that transformers' configuration holds are those of the settings."""
    values = {**settings.defaults, **settings.fixed}
    numbers = families.TABLES[config.model_type].get("numbers", {})
    for field, column in numbers.items():
        key = (column if isinstance(column, str) else column[0]).split()[0]
        expected = getattr(config, key, None)
        if expected is not None and field in values:
            assert values[field] == pytest.approx(expected, rel=1e-12), (field, key)
    assert values["untie_embeddings_and_output_weights"] is not config.tie_word_embeddings
    assert settings.model.windows == expected_windows(config)
    if config.model_type not in WITHOUT_ROPE:
        assert_rotations(config, settings)


@pytest.mark.parametrize(("model_type", "part"), with_proofs(*rotated(FAMILIES, range(PARTS))))
def test_odd_configurations_are_read_as_by_transformers_or_refused(
    tmp_path: Path, model_type: str, part: int
) -> None:
    """Each change of a valid file that transformers loads: renamed, replaced, moved, unused keys.

    Claim (conversion): a config.json means what the configuration class of `transformers` makes of
    it, in more than 1,000 variants of all families, or it is refused by the name of a key
    """
    counts: Counter[str] = Counter()
    errors = []
    for changes in itertools.islice(variants(model_type), part, None, PARTS):
        values = {**base_values(model_type), **copy.deepcopy(changes)}
        (tmp_path / HF_CONFIG).write_text(json.dumps(values))
        config = config_of_transformers(tmp_path)
        if config is None:
            continue
        try:
            settings = described(tmp_path, changes)
            counts["refused" if settings is None else "read"] += 1
            if settings is not None:
                assert_same(config, settings)
                (tmp_path / HF_CONFIG).write_text(json.dumps(config.to_dict()))
                again = read_settings(tmp_path).settings
                assert (again.fixed, again.defaults) == (settings.fixed, settings.defaults)
        except (AssertionError, UserError) as error:
            errors.append(f"{changes}: {error}")
    assert not errors, "\n".join(errors)
    assert counts["read"] >= 2, counts


@pytest.mark.proof
@pytest.mark.parametrize("model_type", FAMILIES)
def test_odd_configurations_have_the_logits_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    errors = []
    for changes in variants(model_type):
        values = {**base_values(model_type), **copy.deepcopy(changes)}
        (tmp_path / HF_CONFIG).write_text(json.dumps(values))
        if config_of_transformers(tmp_path) is None or described(tmp_path, changes) is None:
            continue
        try:
            config = transformers.AutoConfig.from_pretrained(tmp_path)
            config.dtype = None
            model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
            randomize(model)
            expected = logits_of(model, TOKENS)
        except (LookupError, TypeError, ValueError):
            continue  # transformers has a configuration that its model does not accept
        model.save_pretrained(tmp_path)
        (tmp_path / HF_CONFIG).write_text(json.dumps(values))
        found = logits(open_hf(tmp_path), TOKENS)[..., :VOCAB]
        error = float((found - expected).abs().max() / expected.abs().max())
        if not error < 1e-4:
            errors.append(f"{changes}: {error:.1e}")
    assert not errors, "\n".join(errors)


def test_every_key_of_a_configuration_class_is_known() -> None:
    """A key that only one family has is refused in the files of the other ones."""
    for name in FAMILIES:
        keys = CONFIG_MAPPING[name].default_config_fields().keys() | {
            *CONFIG_MAPPING[name].attribute_map
        }
        unknown = keys - OF_MODELS - WITHOUT_EFFECT - ONLY.keys()
        assert not unknown, (name, unknown)
