"""From the configuration to a running engine: the model is built here, for ZeRO-3 in pieces."""

from __future__ import annotations

import copy
import importlib
from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.runtime import compiler
from deepspeed.runtime.config import DeepSpeedConfig
from pydantic import ValidationError

from megatron_ds.config import Config
from megatron_ds.engine import readback
from megatron_ds.engine.ds_activation_checkpointing import configure_checkpointing
from megatron_ds.engine.ds_config import build_ds_config
from megatron_ds.engine.param_groups import parameter_groups
from megatron_ds.engine.zero import ZeroEngine
from megatron_ds.model.gpt import GPTModel
from megatron_ds.model.packed_attention import PackingOptions, select_flex_attention
from megatron_ds.parallel.activation_checkpointing import ActivationCheckpointing
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams


def build_engine(
    config: Config, mesh: Mesh, device: torch.device, eod: int | None = None
) -> ZeroEngine:
    """The model of `config`, cut as `mesh` says, in a DeepSpeed engine. Collective.

    eod: id of the end-of-document token; --reset-position-ids and --reset-attention-mask need it.
    Needs an initialised process group and a configuration whose vocabulary is known. Raises
    ValueError for values of the user's file that DeepSpeed does not take, and for an engine that
    does not hold what the configuration says.
    """
    _import_muon_without_compile()
    ds_config = build_ds_config(config, mesh.dp.size)
    mpu = mesh.mpu()
    _validate_with_deepspeed(ds_config, mpu, config.deepspeed.deepspeed_config)
    rng = RngStreams(mesh.tp.rank, device)
    checkpoint = None
    if config.recompute.by_deepspeed:
        checkpoint = configure_checkpointing(config.recompute, config.model.layers, mpu, rng)
    recompute = ActivationCheckpointing(config.recompute, rng, checkpoint)
    documents = _document_rules(config, mesh, device, eod)
    with _zero3_init_context(ds_config, mesh, mpu):
        model = GPTModel(
            config.model,
            mesh=mesh,
            rng=rng,
            seed=config.runtime.seed,
            recompute=recompute,
            documents=documents,
        )
    if config.runtime.compile:
        model.compile_layers(lengths_vary=config.schedule.curriculum_seqlen is not None)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=parameter_groups(model, config.optimizer.weight_decay),
        config=ds_config,
        mpu=mpu,
        dist_init_required=False,
    )
    return ZeroEngine(
        engine,
        ds_config=ds_config,
        effective=readback.check(config, mesh, engine, ds_config),
        mesh=mesh,
        rng=rng,
        seed=config.runtime.seed,
        device=device,
    )


def _document_rules(
    config: Config, mesh: Mesh, device: torch.device, eod: int | None
) -> PackingOptions | None:
    """What happens at the bounds of documents, and by which kernel; None if nothing does."""
    data, micro = config.data, config.schedule.micro_batch_size
    if not (data.reset_position_ids or data.reset_attention_mask):
        return None
    if eod is None:
        raise ValueError(
            "--reset-position-ids and --reset-attention-mask find documents by the tokenizer's "
            "end-of-document token, and this tokenizer has none"
        )
    flex, why_not = None, ""
    if data.reset_attention_mask:
        assert micro is not None
        dtype = getattr(torch, readback.DTYPES[config.precision.name])
        flex, why_not = select_flex_attention(config.model, micro, mesh.tp.size, dtype, device)
    return PackingOptions(eod, data.reset_position_ids, data.reset_attention_mask, flex, why_not)


def _import_muon_without_compile() -> None:
    """Imports DeepSpeed's Muon with its kernels as plain functions.

    Every ZeRO optimizer asks whether it was given Muon, and importing that compiles its kernels: a
    second of each start and 40 MB of the compiler's modules, for an optimizer that is never built
    here. DeepSpeed itself has the decorator that leaves a function alone, for a torch without a
    compiler.
    """
    compiled = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compiled


def _validate_with_deepspeed(ds_config: dict[str, Any], mpu: object, path: str | None) -> None:
    """Lets DeepSpeed read the configuration before anything is built.

    path: the user's file, which a value of the wrong kind must come from.
    """
    try:
        DeepSpeedConfig(copy.deepcopy(ds_config), mpu)
    except ValidationError as error:
        wrong = "".join(
            f"\n  - {'.'.join(map(str, item['loc']))} {item['input']!r}: {item['msg']}"
            for item in error.errors()
        )
        raise ValueError(f"{path}: DeepSpeed does not take{wrong}") from error


def _zero3_init_context(ds_config: dict[str, Any], mesh: Mesh, mpu: object) -> Any:
    """Under ZeRO-3 each parameter is cut as soon as it is made, so no rank holds the whole model.

    The group must be named: by default DeepSpeed cuts over the whole world, which mixes the
    shards of different tensor-parallel ranks without an error.
    """
    if ds_config["zero_optimization"]["stage"] != 3:
        return nullcontext()
    # The dtype comes from ds_config: one given here would be replaced by bf16 on a device that has
    # no fp16.
    return deepspeed.zero.Init(
        config_dict_or_path=ds_config, mpu=mpu, data_parallel_group=mesh.dp.handle
    )
