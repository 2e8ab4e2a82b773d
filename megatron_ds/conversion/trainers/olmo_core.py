"""Models of OLMo-core.

    stepN/config.json         the settings of the run, "model" among them
    stepN/model_and_optim     a state dict of torch.distributed, weights below `model.`

Facts: ai2-olmo-core 3.0.0, `olmo_core/nn`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.foreign.trainers import INDEX, OLMO_CORE_STATES, detect_trainer
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.model_settings import read_json_object
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.layout import TrainerNames
from megatron_ds.conversion.trainers.olmo_core_experts import EXPERTS, expert_matrices
from megatron_ds.conversion.trainers.olmo_core_settings import blocks_of, object_of, read_model
from megatron_ds.conversion.trainers.open_model import file_in, open_model, settings_of
from megatron_ds.conversion.trainers.runs.olmo_core import with_olmo_core_run

NAME = "olmo_core"
SETTINGS = "config.json"
PREFIX = "model."
DEFAULT_LENGTH = 2048
NAMES = TrainerNames(
    outer={
        "embedding.word": "embeddings",
        "embedding.norm": "embedding_norm",
        "final_norm": "lm_head.norm",
        "head": "lm_head.w_out",
    },
    layer="blocks.{}",
    inner={
        "attention_norm": "attention_norm",
        "attention.qkv": "attention.w_q attention.w_k attention.w_v",
        "attention.q_norm": "attention.q_norm",
        "attention.k_norm": "attention.k_norm",
        "attention.proj": "attention.w_out",
        "attention_post_norm": "post_attention_norm",
        "mlp_norm": "feed_forward_norm",
        "mlp.fc_in": "feed_forward.w1 feed_forward.w3",
        "mlp.fc_out": "feed_forward.w2",
        "mlp_post_norm": "post_feed_forward_norm",
        "mlp.router": f"{EXPERTS}.router",
        "mlp.experts.fc_in": f"{EXPERTS}.experts.mlp.w1 {EXPERTS}.experts.mlp.w3",
        "mlp.experts.fc_out": f"{EXPERTS}.experts.mlp.w2",
        "mlp.latent_in": f"{EXPERTS}.latent_down_proj",
        "mlp.latent_out": f"{EXPERTS}.latent_up_proj",
    },
    stacked=frozenset(("mlp.experts.fc_in", "mlp.experts.fc_out")),
    single={
        "attention.sinks": "attention.sinks",
        "mlp.router.expert_bias": f"{EXPERTS}.router.score_bias",
    },
)
REORDERED = {"attention_post_norm": "attention_norm", "mlp_post_norm": "feed_forward_norm"}
"""Names of the norms after attention and MLP in blocks without others."""


def open_olmo_core(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of the last step of a folder, or of the folder of a step, and its run.

    Raises:
        UserError: If files are missing or damaged, or the model has parts that ours lacks.
    """
    checkpoint = detect_trainer(path, NAME)
    folder = path if checkpoint is None else checkpoint.path
    states = folder if (folder / INDEX).is_file() else folder / OLMO_CORE_STATES
    has_settings = states != folder or (folder / SETTINGS).is_file()
    step = folder if has_settings else folder.parent
    run = read_json_object(file_in(step, SETTINGS))
    config = ConfigValues(step / SETTINGS, object_of(run.get("model")))
    settings = settings_of(config, lambda values: read_model(values, _length(run)))
    file_in(states, INDEX)
    saved = DcpFolder.open(states)
    theirs = {
        name.removeprefix(PREFIX): tensor
        for name, tensor in saved.tensors.items()
        if name.startswith(PREFIX)
    }
    names = names_of(config.values, settings.model.norm_position)
    source = open_model(step, NAME, settings, expert_matrices(theirs, settings), names)
    return with_olmo_core_run(source, saved, names, run, options)


def names_of(model: Mapping[str, Any], norm_position: str) -> TrainerNames:
    """The names of a model's tensors, and whether neighboring rows are rotated together."""
    inner = dict(NAMES.inner)
    if norm_position == "reordered":
        inner |= REORDERED
    mixers = [
        object_of(block.get("sequence_mixer") or block.get("attention"))
        for block in blocks_of(model)
    ]
    if mixers[0].get("gate") is not None:
        inner["attention.qkv"] += " attention.w_g"
    ropes = (object_of(mixer.get("rope") or {}) for mixer in mixers)
    is_complex = any(rope.get("name") == "complex" for rope in ropes)
    return dataclasses.replace(NAMES, inner=inner, has_neighbors=is_complex)


def _length(run: Mapping[str, Any]) -> int:
    """Tokens of a sequence of the run."""
    for part, key in (("dataset", "sequence_length"), ("train_module", "max_sequence_length")):
        value = run.get(part)
        if isinstance(value, dict) and isinstance(value.get(key), int):
            return int(value[key])
    return DEFAULT_LENGTH
