"""Models in llama.cpp's format: read from and written to GGUF files.

`architectures.py` has what is known of each architecture. llama.cpp does not run.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ds.checkpoint.folders.output_folder import OnTensor
from megatron_ds.config.problems import Problem, UserError, ignore, user_error
from megatron_ds.conversion.finite_tensors import finite
from megatron_ds.conversion.gguf.architectures import ARCHITECTURES, Architecture
from megatron_ds.conversion.gguf.file import (
    QUANTIZED,
    QUANTIZED_BLOCK,
    TYPE_NAMES,
    GgufFile,
    GgufTensor,
    open_file,
    quantized,
    write_file,
)
from megatron_ds.conversion.gguf.key_rows import BIASES, FACTORS, NORM_OF_QUERIES, OUTPUT, OWN
from megatron_ds.conversion.gguf.tensors import (
    RAISED,
    joined,
    keeps_fp32,
    missing_names,
    parts_of,
    their_tensors,
)
from megatron_ds.conversion.gguf.vocabulary import vocabulary_of
from megatron_ds.conversion.huggingface.config_rows import ConfigValues
from megatron_ds.conversion.huggingface.read_config import settings_of
from megatron_ds.conversion.huggingface.written_config import canonical_settings
from megatron_ds.conversion.model_settings import ModelSettings, malformed_values, resolved
from megatron_ds.conversion.published import with_positions
from megatron_ds.conversion.source import (
    READ_DEFAULTS,
    WRITE_DEFAULTS,
    ReadOptions,
    SourceCheckpoint,
    WriteOptions,
    check_sizes,
    declared_weights,
)
from megatron_ds.conversion.weights_locations import gguf_file
from megatron_ds.engine.states.state_reader import TensorReader, TensorReaders
from megatron_ds.model.attention.rule import attention_rules
from megatron_ds.model.position_embedding import rope_rates
from megatron_ds.tokenizer.gguf.keys import FURTHER_ENDS, MODEL, NO_TOKENIZER, PREFIX

PRESENCE = {OUTPUT, NORM_OF_QUERIES, *BIASES}
"""Keys of rows that are the presence of a tensor."""
ARCHITECTURE = "general.architecture"
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
"""Values of general.file_type by the type of matrices."""
QUANTIZED_FILE = 7
QUANTIZATION_VERSION = 2
END = "eos_token_id"
SPECIAL_IDS = {
    "bos_token_id": f"{PREFIX}bos_token_id",
    END: f"{PREFIX}eos_token_id",
    "pad_token_id": f"{PREFIX}padding_token_id",
}
NORM = f"{OWN}norm."
"""Start of keys of the weights of a norm."""
SHOWN_ARCHITECTURES = 3
LARGEST_CHANGE = 0.1
"""Change of a rotation that is accepted with a warning, relative to the one before scaling."""


def open_gguf(path: Path, options: ReadOptions = READ_DEFAULTS) -> SourceCheckpoint:
    """Opens the model of a file.

    Raises:
        UserError: If it is damaged, or the model has parts that ours lacks.
    """
    file = gguf_file(path)
    if file is None:
        raise user_error("foreign-file-unreadable", path=path, error="it is not a GGUF file")
    with malformed_values(file):
        return _open(file)


def _open(path: Path) -> SourceCheckpoint:
    content = open_file(path)
    name = content.keys.get(ARCHITECTURE)
    architecture = ARCHITECTURES.get(str(name))
    if architecture is None:
        known = ", ".join(ARCHITECTURES)
        raise user_error("gguf-architecture-unknown", path=path, name=name, known=known)
    values = _row_values(architecture, content)
    config = ConfigValues(path, values)
    settings = settings_of(architecture.rows, config)
    if config.lacking:
        raise user_error("hf-parts-lacking", path=path, parts="; ".join(config.lacking))
    ids = {
        key: content.keys[theirs] for key, theirs in SPECIAL_IDS.items() if theirs in content.keys
    }
    generation = {END: ends} if len(ends := _ends_of(content)) > 1 else {}
    settings = dataclasses.replace(
        settings,
        special_ids=ids,
        generation=generation,
        tokenizer=_tokenizer_of(content, path),
        may_have_padding=True,
    )
    theirs = {key: finite(tensor, key, path) for key, tensor in content.tensors.items()}
    theirs.pop(FACTORS, None)
    if not settings.model.untie_embeddings_and_output_weights:
        theirs.pop(OUTPUT, None)
    check_sizes(settings, theirs, path)
    parts = parts_of(architecture, settings)
    missing, unknown = missing_names(parts, theirs)
    if missing:
        raise user_error("hf-tensors-missing", path=path, names=", ".join(missing))
    if unknown:
        raise user_error("hf-tensors-unknown", path=path, names=", ".join(unknown))
    for part in itertools.chain.from_iterable(parts.values()):
        if (shape := theirs[part.name].shape) != part.shape:
            values = {"shape": [*shape], "expected": [*part.shape]}
            raise user_error("weights-shape-mismatch", name=part.name, **values)
    tensors = _read_tensors(architecture, settings, content, theirs)
    notes: tuple[Problem, ...] = ()
    if QUANTIZED in content.type_names.values():
        notes = (Problem("gguf-dequantized", path=path),)
    source = SourceCheckpoint(path, "gguf", settings, tensors, notes=notes)
    return source.checked(may_be_padded=False)


def _tokenizer_of(content: GgufFile, path: Path) -> dict[str, Any]:
    """Fields of `TokenizerConfig` for the tokenizer of a file; empty if it has none."""
    if content.keys.get(MODEL) in (None, *NO_TOKENIZER):
        return {}
    return {"tokenizer_type": "HFTokenizer", "tokenizer_model": str(path)}


def _ends_of(content: GgufFile) -> list[int]:
    """The ids at which the runtime ends texts."""
    names = (SPECIAL_IDS[END], *(f"{PREFIX}{name}" for name in FURTHER_ENDS))
    return sorted({content.keys[name] for name in names if name in content.keys})


def _row_values(architecture: Architecture, content: GgufFile) -> dict[str, Any]:
    """The values that rows read: keys without the architecture's name, and names of tensors."""
    start = f"{architecture.name}."
    values: dict[str, Any] = {
        key.removeprefix(start): value
        for key, value in content.keys.items()
        if key.startswith((start, OWN))
    }
    values |= dict.fromkeys(content.tensors, True)
    if FACTORS in content.tensors:
        values[FACTORS] = content.tensors[FACTORS].read().tolist()
    embedding = architecture.names["embedding.word"]
    values["vocab_size"] = content.tensors[f"{embedding}.weight"].shape[0]
    values["model_type"] = architecture.family
    return values


def _read_tensors(
    architecture: Architecture, settings: ModelSettings, content: GgufFile, theirs: TensorReaders
) -> dict[str, TensorReader]:
    """Our tensors, in the type of the matrices as far as it has their values: a file has 32 bits
    for norms and biases."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in theirs.values():
        sizes[tensor.dtype] += tensor.numel
    dtype = sizes.most_common(1)[0][0]
    tensors: dict[str, TensorReader] = {}
    declared = declared_weights(settings.model, settings.moe)
    for name, parts in parts_of(architecture, settings).items():
        tensor = joined(parts, declared[name].shape, theirs)
        if parts[0].form == RAISED:
            tensor = _exact_norm(tensor, content.keys.get(f"{NORM}{parts[0].name}"))
        if tensor.dtype != dtype and all(keeps_fp32(part.name, part.shape) for part in parts):
            value = tensor.read()
            if torch.equal(value.to(dtype).to(value.dtype), value):
                tensor = tensor.to(dtype)
        tensors[name] = tensor
    return tensors


def _exact_norm(tensor: TensorReader, stored: Any) -> TensorReader:
    """A norm of 1 + weight, with the weights of this program if they give the same sums."""
    if not isinstance(stored, list) or len(stored) != tensor.numel:
        return tensor
    value = torch.tensor(stored, dtype=torch.float32)
    return TensorReader.of(value) if torch.equal(value + 1 - 1, tensor.read()) else tensor


def _exact_norms(architecture: Architecture, source: SourceCheckpoint) -> dict[str, list[float]]:
    """Weights of norms that their sums with 1 do not have, by key."""
    keys = {}
    for name, (part, *_) in parts_of(architecture, source.settings).items():
        if part.form == RAISED:
            value = source.tensors[name].read().float()
            if not torch.equal(value + 1 - 1, value):
                keys[f"{NORM}{part.name}"] = value.tolist()
    return keys


def write_gguf(
    source: SourceCheckpoint,
    path: Path,
    options: WriteOptions = WRITE_DEFAULTS,
    on_tensor: OnTensor = ignore,
) -> None:
    """Writes a file for llama.cpp, complete, or not at all.

    Args:
        source: The weights.
        path: Must not exist.
        options: Whether matrices are quantized.
        on_tensor: Reports progress.

    Raises:
        UserError: If llama.cpp would compute another model or give other ids, with all reasons, or
            if the file exists.
        OSError: If the disk fails.
    """

    def warn(problem: Problem) -> None:
        options.warn(f"WARNING: {problem.render()}")

    problems: list[Problem] = []
    if depths := source.settings.model.mtp_num_layers:
        warn(Problem("hf-without-predictions", depths=depths))
        source = source.without_predictions()
    if os.path.lexists(path):
        problems.append(Problem("output-file-exists", path=path))
    data = None if source.native is None else source.native.run.config.get("data")
    vocabulary = vocabulary_of(source.settings, data)
    settings, change = _with_rounded_yarn(source.settings)
    if change:
        warn(Problem("gguf-yarn-rounded", change=change))
    try:
        architecture, values = architecture_of(settings)
    except UserError as error:
        problems += error.problems
    problems += vocabulary.problems
    if problems:
        raise UserError(*problems)
    for problem in vocabulary.warnings:
        warn(problem)
    if source.settings.model.has_gelu:
        warn(Problem("gguf-gelu-rounded"))
    is_quantized = options.quantization is not None
    tensors = _written_tensors(architecture, source, values, is_quantized=is_quantized)
    keys = _keys(architecture, source, values, is_quantized=is_quantized)
    keys |= vocabulary.keys
    write_file(path, architecture.name, keys, tensors, on_tensor, source.confirm)


def _keys(
    architecture: Architecture,
    source: SourceCheckpoint,
    values: Mapping[str, Any],
    *,
    is_quantized: bool,
) -> dict[str, Any]:
    """All keys but those of the tokenizer."""
    dtype = source.dtype if source.dtype in FILE_TYPES else torch.float32
    general = {
        "general.type": "model",
        "general.file_type": QUANTIZED_FILE if is_quantized else FILE_TYPES[dtype],
        "general.quantization_version": QUANTIZATION_VERSION,
    }
    rows = {
        key if key.startswith(OWN) else f"{architecture.name}.{key}": value
        for key, value in values.items()
        if key not in (*PRESENCE, FACTORS)
    }
    return general | rows | _exact_norms(architecture, source)


def _written_tensors(
    architecture: Architecture,
    source: SourceCheckpoint,
    values: Mapping[str, Any],
    *,
    is_quantized: bool,
) -> dict[str, GgufTensor]:
    tensors: dict[str, GgufTensor] = {}
    if (factors := values.get(FACTORS)) is not None:
        reader = TensorReader.of(torch.tensor(factors, dtype=torch.float32))
        tensors[FACTORS] = GgufTensor(reader.shape, "F32", reader)
    for name, tensor in their_tensors(architecture, source).items():
        dtype = tensor.dtype if tensor.dtype in TYPE_NAMES else torch.float32
        if keeps_fp32(name, tensor.shape):
            dtype = torch.float32
        elif is_quantized and tensor.shape[-1] % QUANTIZED_BLOCK == 0:
            tensors[name] = GgufTensor(tensor.shape, QUANTIZED, quantized(tensor))
            continue
        elif is_quantized:
            dtype = torch.float16
        tensors[name] = GgufTensor(tensor.shape, TYPE_NAMES[dtype], tensor.to(dtype))
    return tensors


def _with_rounded_yarn(settings: ModelSettings) -> tuple[ModelSettings, float]:
    """The settings of a gpt-oss with the range that the runtime rounds, as for the published model,
    and the largest change of a rotation, relative to the one before scaling; 0 if there is none or
    it is too large."""
    model = settings.model
    is_rounded = model.yarn_correction_range_round_to_int
    if model.softmax_type != "learnable" or model.position_embedding_type != "yarn" or is_rounded:
        return settings, 0.0
    fixed = {**settings.fixed, "yarn_correction_range_round_to_int": True}
    rounded = dataclasses.replace(settings, fixed=fixed)
    ropes = [attention_rules(one.model)[0].rope for one in (settings, rounded)]
    unscaled = model.rotary_base ** -(torch.arange(0, model.rotated_size, 2) / model.rotated_size)
    exact, theirs = (rope_rates(rope, unscaled.device) for rope in ropes if rope is not None)
    change = float(((theirs - exact) / unscaled).abs().max())
    return (rounded, change) if change < LARGEST_CHANGE else (settings, 0.0)


def architecture_of(settings: ModelSettings) -> tuple[Architecture, dict[str, Any]]:
    """The architecture that a model is written as, and the values of its rows.

    Raises:
        UserError: If none has the parts of the model.
    """
    settings = canonical_settings(with_positions(settings))
    known = [one for one in ARCHITECTURES.values() if settings.model_type in one.families]
    tried = []
    for architecture in {one.name: one for one in (*known, *ARCHITECTURES.values())}.values():
        values: dict[str, Any] = {}
        for row in architecture.rows:
            values |= row.write(settings.moe if row.is_of_experts else settings.model)
        values = {key: value for key, value in values.items() if value is not None}
        differences = [*_differences(architecture, values, settings)]
        if not differences:
            return architecture, values
        tried.append((architecture, differences))
    if not known:
        tried.sort(key=lambda entry: len(entry[1]))
    shown = "".join(
        f"\n  - {architecture.name}: {', '.join(differences)}"
        for architecture, differences in tried[: len(known) or SHOWN_ARCHITECTURES]
    )
    raise user_error("gguf-no-architecture", tried=shown)


def _differences(
    architecture: Architecture, values: Mapping[str, Any], settings: ModelSettings
) -> Iterator[str]:
    """Parts that llama.cpp would compute differently: where the keys read back are another model,
    or a weight has no place."""
    config = ConfigValues(Path(ARCHITECTURE), {**values, "model_type": architecture.family})
    try:
        theirs = settings_of(architecture.rows, config)
    except UserError as error:
        yield str(error)
        return
    yield from config.lacking
    if config.lacking:
        return
    read, expected = (_comparable(one) for one in (theirs, settings))
    for name in sorted({*read, *expected}):
        if read.get(name) != expected.get(name):
            yield f"{name} {expected.get(name)}"


def _comparable(settings: ModelSettings) -> dict[str, Any]:
    """The fields that a model computes with, in one of several spellings, as floats of 32 bits."""
    model = settings.model
    fields = resolved(settings)
    scale = model.softmax_scale
    fields["softmax_scale"] = float(f"{model.head_dim**-0.5 if scale is None else scale:.6g}")
    if model.is_rotary:
        fields["rotary_percent"] = model.rotated_size / model.rotated_dim
    if fields.get("rotary_base_per_layer"):
        fields.pop("rotary_base", None)
    if fields.get("moe_router_topk_scaling_factor") == 1:
        del fields["moe_router_topk_scaling_factor"]
    if settings.moe.is_used and all(fields["moe_layer_freq"] or [0]):
        del fields["ffn_hidden_size"]
    return {name: _rounded(value) for name, value in fields.items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(np.float32(value))
    return tuple(map(_rounded, value)) if isinstance(value, tuple) else value
