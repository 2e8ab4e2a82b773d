"""Models of torchtitan: Llama 3, and Qwen 3 with and without experts.

    step-N/.metadata, *.distcp     a state dict of torch.distributed, weights at its top
    step-N/model-*.safetensors     its export, with the names of transformers and no settings

No file has the settings of the model. Shapes give most of them; the rest are the user's options, or
a config.json of transformers next to the weights. Facts: torchtitan 0.3.0, `models/llama3`,
`models/qwen3` and `models/common`; older versions have other names of some modules. Its experts
compute in bf16, whatever the type of the weights is.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron_ds.config import flag_of
from megatron_ds.config.problems import Problem, user_error
from megatron_ds.conversion.dcp.read import DcpFolder
from megatron_ds.conversion.foreign.trainers import (
    INDEX,
    SAFETENSORS,
    SAFETENSORS_INDEX,
    detect_trainer,
)
from megatron_ds.conversion.huggingface.config_rows import ConfigValues, Fields
from megatron_ds.conversion.huggingface.read_config import read_settings
from megatron_ds.conversion.model_settings import ModelSettings
from megatron_ds.conversion.safetensors_files import open_safetensors, read_index
from megatron_ds.conversion.source import READ_DEFAULTS, ReadOptions, SourceCheckpoint
from megatron_ds.conversion.trainers.layout import EXPERT, TrainerNames
from megatron_ds.conversion.trainers.open_model import file_in, open_model, settings_of
from megatron_ds.conversion.trainers.runs.torchtitan import with_torchtitan_run
from megatron_ds.conversion.weights_locations import is_hf
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders

NAME = "torchtitan"
NOT_WEIGHTS = ("train_state", "optimizer", "lr_scheduler", "dataloader")
"""Starts of the names of other entries of a full checkpoint."""
STATE = re.compile(r"(.+\.)?(exp_avg|exp_avg_sq|step|param_groups)(\..+)?")
"""Names of the states of an optimizer."""
NAMES = TrainerNames(
    outer={"embedding.word": "tok_embeddings", "final_norm": "norm", "head": "lm_head"},
    layer="layers.{}",
    inner={
        "attention_norm": "attention_norm",
        "attention.qkv": "attention.qkv_linear.wq attention.qkv_linear.wk attention.qkv_linear.wv",
        "attention.q_norm": "attention.q_norm",
        "attention.k_norm": "attention.k_norm",
        "attention.proj": "attention.wo",
        "mlp_norm": "ffn_norm",
        "mlp.fc_in": "feed_forward.w1 feed_forward.w3",
        "mlp.fc_out": "feed_forward.w2",
        "mlp.router": "moe.router.gate",
        "mlp.experts.fc_in": (
            "moe.routed_experts.inner_experts.w1_EFD moe.routed_experts.inner_experts.w3_EFD"
        ),
        "mlp.experts.fc_out": "moe.routed_experts.inner_experts.w2_EDF",
        "mlp.shared.fc_in": "moe.shared_experts.w1 moe.shared_experts.w3",
        "mlp.shared.fc_out": "moe.shared_experts.w2",
    },
    has_neighbors=True,
    stacked=frozenset(("mlp.experts.fc_in", "mlp.experts.fc_out")),
    single={"mlp.router.expert_bias": "moe.expert_bias_E"},
)
OLDER = {"attention.qkv": "attention.wq attention.wk attention.wv"}
"""Names of modules before version 0.3."""
EXPORTED = TrainerNames(
    outer={"embedding.word": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"},
    layer="model.layers.{}",
    inner={
        "attention_norm": "input_layernorm",
        "attention.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "attention.proj": "self_attn.o_proj",
        "mlp_norm": "post_attention_layernorm",
        "mlp.fc_in": "mlp.gate_proj mlp.up_proj",
        "mlp.fc_out": "mlp.down_proj",
        "mlp.router": "mlp.gate",
        "mlp.experts.fc_in": "mlp.experts.{expert}.gate_proj mlp.experts.{expert}.up_proj",
        "mlp.experts.fc_out": "mlp.experts.{expert}.down_proj",
    },
)
REQUIRED = ("num_attention_heads", "rotary_base")
"""Options of the model that shapes do not give and that torchtitan has no default of."""
ASSUMED: dict[str, Any] = {"norm_epsilon": 1e-5, "use_rope_scaling": False, "seq_length": 2048}
"""Options that may be left out, with a warning."""
QWEN = {"norm_epsilon": 1e-6}
"""Other values of Qwen 3."""
SCALING = ("rope_scaling_factor", "rotary_seq_len_interpolation_factor", "rotary_percent")
OPTIONS = (*REQUIRED, *ASSUMED, *SCALING)
"""All options that no file has, of a model without experts."""
ROUTING: dict[str, Any] = {"moe_router_score_function": "softmax", "moe_router_pre_softmax": False}
"""Options of the router that may be left out, with a warning: those of Qwen 3."""
EXPERT_BIAS = "mlp.router.expert_bias"
GROUPS = ("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk")
SCORES_OF_GROUP = 2
"""Scores of experts by whose sum a group is chosen; here it is as many as a token uses of one."""
OPTIONS_OF_EXPERTS = ("moe_router_topk", *ROUTING, *GROUPS)
"""All options of experts that no file has."""
EXPERTS = re.compile(r"(layers|model\.layers)\.(\d+)\.(moe|mlp\.experts)\..+")


def open_torchtitan(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of the last step of a folder, or of the folder of a step, and its run.

    Args:
        path: The folder.
        options: `model` has the options that shapes do not give.

    Raises:
        UserError: If files are missing or damaged, options are missing, or the model has parts that
            ours lacks.
    """
    checkpoint = detect_trainer(path, NAME)
    folder = path if checkpoint is None else checkpoint.path
    if not (folder / INDEX).is_file():
        return _opened(folder, _exported(folder), EXPORTED, options)
    file_in(folder, INDEX)
    saved = DcpFolder.open(folder)
    theirs = _weights_of(saved.tensors)
    names = _names_of(theirs)
    source = _opened(folder, theirs, names, options)
    return with_torchtitan_run(source, saved, names, options)


def _opened(
    folder: Path, theirs: TensorReaders, names: TrainerNames, options: ReadOptions
) -> SourceCheckpoint:
    """The model alone."""
    if is_hf(folder):
        settings = _described(folder)
        if not settings.moe.moe_router_enable_expert_bias:
            theirs = _without_biases(folder, theirs)
        return open_model(folder, NAME, settings, theirs, names)
    flags = {name: options.model[name] for name in options.given & options.model.keys()}
    fields, notes = fields_of(folder, theirs, names, flags)
    if not fields.get("moe_router_enable_expert_bias"):
        theirs = _without_biases(folder, theirs)
    settings = settings_of(ConfigValues(folder, {}), lambda config: fields)
    return open_model(folder, NAME, settings, theirs, names, notes)


def _without_biases(folder: Path, theirs: TensorReaders) -> TensorReaders:
    """The tensors without the biases by which experts are selected, which are still zeros.

    Raises:
        UserError: If one is not: ours are added to sigmoid scores alone.
    """
    biases = [name for name in theirs if name.endswith(f".{NAMES.single[EXPERT_BIAS]}")]
    for name in biases:
        if theirs[name].read().any():
            parts = f"a bias of the selection by softmax scores ({name})"
            raise user_error("foreign-parts-lacking", path=folder, parts=parts)
    return {name: tensor for name, tensor in theirs.items() if name not in biases}


def _described(folder: Path) -> ModelSettings:
    """The settings in a config.json of transformers next to the weights."""
    return dataclasses.replace(read_settings(folder).settings, tokenizer={})


def _weights_of(tensors: TensorReaders) -> dict[str, TensorReader]:
    """The tensors of a checkpoint that are weights."""
    return {
        name: tensor
        for name, tensor in tensors.items()
        if not name.startswith(NOT_WEIGHTS) and not STATE.fullmatch(name)
    }


def _names_of(theirs: TensorReaders) -> TrainerNames:
    """The names of a version, and the order of the rows: Qwen 3, whose queries and keys have norms,
    rotates the halves of a head."""
    names = NAMES
    if "layers.0.attention.wq.weight" in theirs:
        names = dataclasses.replace(names, inner={**names.inner, **OLDER})
    if "output.weight" in theirs:
        names = dataclasses.replace(names, outer={**names.outer, "head": "output"})
    return dataclasses.replace(
        names, has_neighbors="layers.0.attention.q_norm.weight" not in theirs
    )


def _exported(folder: Path) -> dict[str, TensorReader]:
    """The tensors of an export; those in the folder `sharded` are the same again."""
    if (folder / SAFETENSORS_INDEX).is_file():
        places = read_index(file_in(folder, SAFETENSORS_INDEX))
        files = sorted({path.name for path in places.values()})
    else:
        places = {}
        files = [SAFETENSORS]
    tensors: dict[str, TensorReader] = {}
    for name in files:
        tensors |= open_safetensors(file_in(folder, name))
    return tensors


def fields_of(
    folder: Path, theirs: TensorReaders, names: TrainerNames, flags: Mapping[str, Any]
) -> tuple[Fields, list[Problem]]:
    """The options of the model, and what was assumed.

    Raises:
        UserError: If tensors by which the model is known are missing, or options are.
    """
    shapes = _Shapes(folder, theirs, names)
    head = shapes.optional("attention.q_norm", "weight")
    required = (*REQUIRED, "moe_router_topk") if shapes.expert_layers else REQUIRED
    missing = [name for name in required if name not in flags]
    if head is not None and "num_attention_heads" in missing:
        missing.remove("num_attention_heads")
    if missing:
        shown = ", ".join(flag_of(name) for name in missing)
        raise user_error("foreign-options-missing", path=folder, names=shown)
    assumed: dict[str, Any] = ASSUMED if head is None else ASSUMED | QWEN
    if shapes.expert_layers:
        assumed = assumed | ROUTING
    queries, keys, _ = (shapes.rows("attention.qkv", index) for index in range(3))
    if head is None:
        heads = flags["num_attention_heads"]
        head_dim = max(queries // heads, 1)
    else:
        head_dim = head[0]
        heads = flags.get("num_attention_heads", queries // head_dim)
    if heads * head_dim != queries or keys % head_dim:
        texts = {"heads": heads, "queries": queries, "keys": keys}
        raise user_error("foreign-heads-wrong", "num_attention_heads", path=folder, **texts)
    table = theirs[f"{names.outer['embedding.word']}.weight"]
    has_bias = shapes.optional("attention.proj", "bias") is not None
    fields: Fields = {
        **assumed,
        **{name: flags[name] for name in (*assumed, *SCALING) if name in flags},
        "num_layers": shapes.layers,
        "hidden_size": table.shape[1],
        "vocab_size": table.shape[0],
        "num_attention_heads": heads,
        "num_query_groups": keys // head_dim,
        "kv_channels": head_dim,
        "ffn_hidden_size": shapes.mlp_rows,
        "rotary_base": float(flags["rotary_base"]),
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "qk_layernorm": head is not None,
        "add_bias_linear": has_bias,
        "add_qkv_bias": not has_bias and shapes.optional("attention.qkv", "bias") is not None,
        "untie_embeddings_and_output_weights": _is_untied(theirs, names),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    if shapes.expert_layers:
        fields |= _expert_fields(folder, shapes, {**assumed, **flags})
    notes = list(_notes(folder, assumed, flags))
    return fields, notes


def _expert_fields(folder: Path, shapes: _Shapes, flags: Mapping[str, Any]) -> Fields:
    """The options of the experts.

    Raises:
        UserError: If groups of experts are chosen otherwise than by their two best scores.
    """
    experts, width = shapes.experts
    topk = flags["moe_router_topk"]
    if groups := flags.get("moe_router_num_groups"):
        chosen = flags.get("moe_router_group_topk") or groups
        if topk != SCORES_OF_GROUP * chosen:
            parts = f"groups of experts by the best {topk / chosen:g} scores, not the best two"
            raise user_error("foreign-parts-lacking", path=folder, parts=parts)
    shared = shapes.of_experts("mlp.shared.fc_in")
    layers = [int(layer in shapes.expert_layers) for layer in range(shapes.layers)]
    is_sigmoid = flags["moe_router_score_function"] == "sigmoid"
    has_bias = shapes.has_expert_bias and is_sigmoid
    return {
        **{name: flags[name] for name in (*ROUTING, *GROUPS) if name in flags},
        "num_experts": (experts,),
        "moe_router_topk": topk,
        "moe_ffn_hidden_size": width,
        "moe_layer_freq": None if all(layers) else str(layers),
        "moe_shared_expert_intermediate_size": None if shared is None else shared[0],
        "moe_router_enable_expert_bias": True if has_bias else None,
    }


def _notes(folder: Path, assumed: Mapping[str, Any], flags: Mapping[str, Any]) -> Iterator[Problem]:
    shown = {
        name: f"{flag_of(name)} {value}" if value is not False else f"no {flag_of(name)}"
        for name, value in assumed.items()
        if name not in flags
    }
    scaling = "use_rope_scaling"
    hint = ". The published sizes of Llama 3.1 and later are scaled" if scaling in shown else ""
    if shown:
        names = ", ".join(shown.values())
        yield Problem("foreign-options-assumed", path=folder, names=names, hint=hint)


class _Shapes:
    """Shapes of tensors of the first layer, by our names of modules."""

    def __init__(self, folder: Path, theirs: TensorReaders, names: TrainerNames) -> None:
        self._theirs = theirs
        self._names = names
        layer = re.compile(re.escape(names.layer).replace(r"\{\}", r"(\d+)") + r"\..+")
        matches = filter(None, map(layer.fullmatch, theirs))
        self.layers = 1 + max((int(match[1]) for match in matches), default=-1)
        with_experts = filter(None, map(EXPERTS.fullmatch, theirs))
        self.expert_layers = frozenset(int(match[2]) for match in with_experts)
        dense = [layer for layer in range(self.layers) if layer not in self.expert_layers]
        self._dense = dense[0] if dense else None
        wanted = [f"{names.outer['embedding.word']}.weight"]
        wanted += [self._name("attention.qkv", index, "weight") for index in range(3)]
        if self._dense is not None:
            wanted.append(self._name("mlp.fc_in", 0, "weight", self._dense))
        elif self.of_experts("mlp.router") is None:
            wanted.append(self._name("mlp.router", 0, "weight"))
        if missing := [name for name in wanted if name not in theirs]:
            raise user_error("foreign-tensors-missing", path=folder, names=", ".join(missing))

    def _name(self, module: str, index: int, suffix: str, layer: int = 0) -> str:
        stem = self._names.inner[module].split()[index]
        return f"{self._names.layer.format(layer)}.{stem}.{suffix}"

    def optional(self, module: str, suffix: str) -> tuple[int, ...] | None:
        """The shape of a tensor that some models have."""
        tensor = self._theirs.get(self._name(module, 0, suffix))
        return None if tensor is None else tensor.shape

    def rows(self, module: str, index: int) -> int:
        """Rows of one of the tensors of a module."""
        return self._theirs[self._name(module, index, "weight")].shape[0]

    def of_experts(self, module: str) -> tuple[int, ...] | None:
        """The shape of a tensor of the first layer with experts."""
        if module not in self._names.inner or not self.expert_layers:
            return None
        name = self._name(module, 0, "weight", min(self.expert_layers))
        if module in self._names.stacked:
            name = name.removesuffix(".weight")
        tensor = self._theirs.get(name.replace(EXPERT, "0"))
        return None if tensor is None else tensor.shape

    @property
    def experts(self) -> tuple[int, int]:
        """The number of experts, and the width of one."""
        router = self.of_experts("mlp.router")
        matrices = self.of_experts("mlp.experts.fc_in")
        return router[0] if router else 0, matrices[-2] if matrices else 0

    @property
    def mlp_rows(self) -> int:
        """Width of the layers without experts; that of an expert if there are none."""
        if self._dense is None:
            return self.experts[1]
        return self._theirs[self._name("mlp.fc_in", 0, "weight", self._dense)].shape[0]

    @property
    def has_expert_bias(self) -> bool:
        """Whether a bias of each expert takes part in the selection."""
        single = self._names.single.get(EXPERT_BIAS, "")
        prefix = self._names.layer.format(min(self.expert_layers))
        return f"{prefix}.{single}" in self._theirs


def _is_untied(theirs: TensorReaders, names: TrainerNames) -> bool:
    """Whether the output layer has weights of its own: a tied one is saved a second time."""
    head = theirs.get(f"{names.outer['head']}.weight")
    table = theirs[f"{names.outer['embedding.word']}.weight"]
    if head is None or head.shape != table.shape or head.dtype != table.dtype:
        return head is not None
    first = range(min(8, table.shape[0]))
    if not torch.equal(head.read(first), table.read(first)):
        return True
    return not torch.equal(head.read(), table.read())
