"""The settings of a model of Hugging Face, from the config.json of its folder. Imports no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ds.config import ModelConfig, MoEConfig
from megatron_ds.config.fields import field_problems
from megatron_ds.config.model.layer_pattern import MAX_LAYERS
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.conversion.huggingface import tokenizer as hf_tokenizer
from megatron_ds.conversion.huggingface.config_rows import EXPERT_FIELDS, ConfigValues, Row
from megatron_ds.conversion.huggingface.families import FAMILIES, LACKING, Family
from megatron_ds.conversion.huggingface.standard_values import refuse_unused, standard_values
from megatron_ds.conversion.model_settings import ModelSettings, read_json_object
from megatron_ds.conversion.published import SPECIAL_IDS
from megatron_ds.conversion.weights_locations import HF_CONFIG

GENERATION = "generation_config.json"
LARGEST_COUNTS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "first_k_dense_replace"), MAX_LAYERS),
    **dict.fromkeys(("num_nextn_predict_layers", "num_mtp_layers"), MAX_LAYERS),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 10 * MAX_LAYERS),
}
"""Largest value of a key that counts parts of a model, which are described one by one."""
FROM_MODEL_CONFIG = "_from_model_config"
"""Entry of a generation_config.json that has only the special ids of config.json."""


@dataclass(frozen=True)
class DescribedModel:
    """A model as the config.json of its folder describes it."""

    family: Family
    settings: ModelSettings
    notes: tuple[Problem, ...] = ()
    """Warnings for the user."""


def read_settings(path: Path, lacking: list[str] | None = None) -> DescribedModel:
    """The model of a folder.

    Args:
        path: The folder.
        lacking: Receives the features that this package lacks, also for families with Llama's keys.

    Raises:
        UserError: If config.json is damaged, or if the model has features that this package lacks
            and `lacking` is None.
    """
    if not (path / HF_CONFIG).is_file():
        raise user_error("hf-folder-without-config", path=path)
    values = read_json_object(path / HF_CONFIG)
    model_type = values.get("model_type")
    family = FAMILIES.get(str(model_type))
    if family is None and lacking is not None and str(model_type) in LACKING:
        lacking += LACKING[str(model_type)]
        family = FAMILIES["llama"]
    if family is None:
        if parts := LACKING.get(str(model_type)):
            raise user_error("hf-parts-lacking", path=path / HF_CONFIG, parts="; ".join(parts))
        known = ", ".join(FAMILIES)
        raise user_error("hf-model-type", path=path / HF_CONFIG, kind=model_type, known=known)
    config = ConfigValues(path / HF_CONFIG, standard_values(values, family))
    for key, largest in LARGEST_COUNTS.items():
        count = config.values.get(key)
        if isinstance(count, int | float) and count > largest:
            raise config.unusable(key, count, f"at most {largest}")
    settings = settings_of(family.rows, config)
    unknown = sorted(refuse_unused(config, family))
    for key in ("quantization_config", "transformers_weights"):
        if values.get(key) is not None:
            config.lack("weights that are quantized or have another file name", key, "...")
    if lacking is not None:
        lacking += config.lacking
    elif config.lacking:
        raise user_error("hf-parts-lacking", path=path / HF_CONFIG, parts="; ".join(config.lacking))
    file = path / GENERATION
    generation = read_json_object(file) if file.is_file() else {}
    written = {FROM_MODEL_CONFIG, "transformers_version"}
    settings = dataclasses.replace(
        settings,
        tokenizer=hf_tokenizer.settings_of_folder(path),
        special_ids={name: values[name] for name in SPECIAL_IDS if name in values},
        generation={name: value for name, value in generation.items() if name not in written},
    )
    if not unknown:
        return DescribedModel(family, settings)
    keys = ", ".join(unknown)
    architecture = family.architecture
    note = Problem("hf-keys-unused", path=path / HF_CONFIG, keys=keys, architecture=architecture)
    return DescribedModel(family, settings, (note,))


def settings_of(rows: Sequence[Row], config: ConfigValues) -> ModelSettings:
    """The settings that a config.json means; `config.lacking` has what they lack.

    Args:
        rows: Rows of the family of the model.
        config: The values that `standard_values` returns.
    """
    fields: dict[str, Any] = {}
    for row in rows:
        fields |= row.read(config)
    moe = MoEConfig(**{name: fields.pop(name) for name in EXPERT_FIELDS & fields.keys()})
    model = ModelConfig(**fields)
    problems = [*field_problems(model), *model.problems(1)]
    problems += [*field_problems(moe), *moe.problems(model, 1, 1)]
    if problems and not config.lacking:
        shown = "; ".join(problem.render() for problem in problems)
        raise user_error("foreign-file-unreadable", path=config.path, error=shown)
    settings = ModelSettings.of(model, moe, None, None)
    return dataclasses.replace(settings, model_type=config.get("model_type"))
