"""The checkpoints of other programs that are not read, one entry per format.

An entry has the code of the message, which names the program, shows the file by which the format
was recognized, and says what reads it. A program that gets a reader gets a `Format` in
`conversion/registry.py` and loses its entry here. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ds.checkpoint.metadata import MANIFEST, RUN
from megatron_ds.checkpoint.universal.folders import ZERO
from megatron_ds.conversion.foreign.contents import (
    FolderContents,
    is_quantized_by_mlx,
    is_torch_file,
    pickled_texts,
    starts_with,
    tensor_names,
)

LLM_C = (20240326).to_bytes(4, "little")
"""First number in a model file of llm.c."""
INDEX = ".metadata"
"""Index of a checkpoint of torch.distributed."""
LIGHTNING = "pytorch-lightning_version"
"""Key of the state of a trainer of PyTorch Lightning."""
NEMO_WEIGHTS = "model_weights.ckpt"
FSDP_FOLDER = r"pytorch_model_fsdp_\d+"
"""Folder of a model that accelerate saves with FSDP."""
TORCH_FILE = r".*\.(pt|pth|ckpt|bin)"
NAMES_OF_TRANSFORMERS = re.compile(
    r"(.*\.)?(model\.layers|transformer\.h|gpt_neox\.layers|model\.decoder\.layers)\.\d+\..+"
    r"|(.*\.)?(embed_tokens|embed_in|wte)\.weight"
    r"|(.*\.)?(self_attn\.\w+_proj|attn\.c_attn)\.(weight|bias)"
)
"""Names of weights in models of transformers."""
LAYER_OF_MEGATRON = re.compile(r".*\bdecoder\.layers\.\d+\..+")
FILES_READ = 4
"""Files of a checkpoint whose names of tensors are compared."""


@dataclass(frozen=True)
class ForeignFormat:
    """A format of another program."""

    code: str
    """Code of the message."""
    name: str
    """Name of the program or format in the documentation."""
    find: Callable[[FolderContents], Path | None]
    """Finds the file or folder that shows the format."""


def _olmo(contents: FolderContents) -> Path | None:
    """OLMo's first trainer: config.yaml next to the weights, unsharded or one file per rank."""
    if not contents.has("config.yaml"):
        return None
    weights = contents.first(r"model\.(pt|safetensors)")
    if weights is not None and contents.first(r"(train|optim)\.(pt|safetensors)"):
        return weights
    for name in ("model/rank0.pt", f"model_and_optim/{INDEX}"):
        if contents.has(name, "train"):
            return contents.path / name
    return None


def _litgpt(contents: FolderContents) -> Path | None:
    """Adapters, of which the weights are a part: lit_model.pth.lora."""
    return contents.first(r"lit_model\.pth\.\w+")


def _nanochat(contents: FolderContents) -> Path | None:
    for path in contents.matching(r"model_\d{6}\.pt"):
        settings = f"meta_{path.stem.removeprefix('model_')}.json"
        if (path.parent / settings).is_file():
            return path
    return None


def _nanogpt(contents: FolderContents) -> Path | None:
    """A dictionary with the arguments of the model and the best loss."""
    keys = {"model_args", "iter_num"}
    return _first(contents.matching(r".*\.pt"), lambda path: keys <= pickled_texts(path))


def _llm_c(contents: FolderContents) -> Path | None:
    return _first(contents.matching(r".*\.bin"), lambda path: starts_with(path, LLM_C))


def _lingua(contents: FolderContents) -> Path | None:
    is_lingua = contents.first(r"train_state_\d{5}\.json") and contents.has("params.json")
    return contents.path / "params.json" if is_lingua and contents.has(INDEX) else None


def _composer(contents: FolderContents) -> Path | None:
    """Files such as ep0-ba100-rank0.pt."""
    return _first(contents.matching(r"(ep\d+-ba\d+|latest)-rank\d+\.pt"), is_torch_file)


def _composer_folder(contents: FolderContents) -> Path | None:
    """Sharded: a folder such as ep0-ba100."""
    is_composer = re.fullmatch(r"ep\d+-ba\d+", contents.path.name) and contents.has(INDEX)
    return contents.path / INDEX if is_composer else None


def _bridge(contents: FolderContents) -> Path | None:
    """Megatron Core's files without Megatron-LM's arguments, which are in run_config.yaml."""
    path = contents.path / "run_config.yaml"
    is_core = contents.has("metadata.json") or contents.has(INDEX)
    return path if path.name in contents.names and is_core else None


def _nemo_2(contents: FolderContents) -> Path | None:
    """The folder of a checkpoint, by its folders weights and context."""
    if not contents.has("weights"):
        return None
    return contents.first_of("context/model.yaml", "context/io.json")


def _nemo_2_weights(contents: FolderContents) -> Path | None:
    """The folder weights itself: Megatron Core's files, with Lightning's state in common.pt."""
    if contents.path.name != "weights":
        return None
    above = FolderContents(contents.path.parent)
    return _nemo_2(above) or _lightning_in_core(contents)


def _nemo_1(contents: FolderContents) -> Path | None:
    """Archives, and what they have: weights in a file, in Megatron Core's files, by rank."""
    if path := _first(contents.matching(r".+\.nemo"), lambda path: True):
        return path
    if not contents.has("model_config.yaml"):
        return None
    return contents.first_of(
        NEMO_WEIGHTS, "model_weights", f"tp_rank_00_pp_rank_000/{NEMO_WEIGHTS}"
    )


def _nemo_1_folder(contents: FolderContents) -> Path | None:
    """What looks like Megatron-LM's: the files of a tensor-parallel rank, and Core's of a run or
    an archive."""
    above = contents.path.parent / "model_config.yaml"
    if contents.path.name == "model_weights" and above.is_file():
        return above
    return contents.first_of(f"mp_rank_00/{NEMO_WEIGHTS}") or _lightning_in_core(contents)


def _lightning_in_core(contents: FolderContents) -> Path | None:
    """Megatron Core's files of a trainer of Lightning."""
    path = contents.first_of("common.pt")
    return path if path is not None and LIGHTNING in pickled_texts(path) else None


def _lightning(contents: FolderContents) -> Path | None:
    """A file with the version of Lightning."""
    return _first(contents.matching(r".*\.ckpt"), lambda path: LIGHTNING in pickled_texts(path))


def _lightning_folder(contents: FolderContents) -> Path | None:
    """Sharded: what is not sharded is in meta.pt."""
    return contents.path / "meta.pt" if contents.has("meta.pt", INDEX) else None


def _levanter(contents: FolderContents) -> Path | None:
    is_levanter = {"step", "timestamp", "is_temporary"} <= contents.values("metadata.json").keys()
    return contents.path / "metadata.json" if is_levanter else None


def _maxtext(contents: FolderContents) -> Path | None:
    """The folder of a step, whose state is the item `items` of Orbax, or this folder."""
    if contents.path.name == "items":
        return contents.first("_METADATA")
    return contents.first_of("items/_METADATA")


def _orbax(contents: FolderContents) -> Path | None:
    return contents.first(r"_CHECKPOINT_METADATA|orbax\.checkpoint|manifest\.ocdbt|_METADATA")


def _meta(contents: FolderContents) -> Path | None:
    return contents.first(r"consolidated\.\d+\.pth")


def _mistral(contents: FolderContents) -> Path | None:
    return contents.first(r"consolidated(-\d+-of-\d+)?\.safetensors")


def _mlx_numpy(contents: FolderContents) -> Path | None:
    return contents.first(r"weights(\.\d+)?\.npz")


def _mlx_adapter(contents: FolderContents) -> Path | None:
    """The newest adapter, or that of an iteration."""
    return contents.first(r"adapters\.(safetensors|npz)") or contents.first(
        r"\d{7}_adapters\.safetensors"
    )


def _mlx_quantized(contents: FolderContents) -> Path | None:
    is_quantized = is_quantized_by_mlx(contents.values("config.json"))
    return contents.path / "config.json" if is_quantized else None


def _adapter(contents: FolderContents) -> Path | None:
    is_adapter = "peft_type" in contents.values("adapter_config.json")
    return contents.path / "adapter_config.json" if is_adapter else None


def _fsdp(contents: FolderContents) -> Path | None:
    """A sharded model of accelerate: the folder, or the one above it."""
    folder = contents.first(FSDP_FOLDER)
    if folder is None and re.fullmatch(FSDP_FOLDER, contents.path.name):
        folder = contents.path
    return folder / INDEX if folder is not None and (folder / INDEX).is_file() else None


def _fsdp_file(contents: FolderContents) -> Path | None:
    return contents.first(r"pytorch_model_fsdp(_\d+)?\.bin")


def _accelerate(contents: FolderContents) -> Path | None:
    is_state = contents.first(r"random_states_\d+\.pkl") is not None
    return (
        contents.first(r"model(_\d+)?\.safetensors|pytorch_model(_\d+)?\.bin") if is_state else None
    )


def _deepspeed(contents: FolderContents) -> Path | None:
    """DeepSpeed's files of a model with the names of transformers."""
    for folder in _deepspeed_folders(contents):
        files = sorted(folder.glob("*model_states.pt"))[:FILES_READ]
        if path := _first(files, lambda path: _any(NAMES_OF_TRANSFORMERS, pickled_texts(path))):
            return path
    return None


def _deepspeed_folders(contents: FolderContents) -> Iterator[Path]:
    """The folder, the one that its pointer names, and its steps, newest first; none of ours."""
    folders = [contents.path, *reversed(contents.matching(r"global_step\d+"))]
    if contents.has("latest"):
        try:
            name = (contents.path / "latest").read_text("utf-8", "replace")[:100].strip()
        except OSError:
            name = ""
        if re.fullmatch(r"\w+", name):
            folders.insert(1, contents.path / name)
    for folder in folders[:FILES_READ]:
        if not any((folder / name).is_file() for name in (RUN, MANIFEST)):
            yield folder


def _universal(contents: FolderContents) -> Path | None:
    """Folders with the names of transformers' weights."""
    candidates = [contents.path, *contents.matching(r".+_universal")]
    for folder in candidates:
        for path in folder.glob(f"{ZERO}/*/fp32.pt"):
            if NAMES_OF_TRANSFORMERS.fullmatch(path.parent.name):
                return path
    return None


def _trainer(contents: FolderContents) -> Path | None:
    return contents.first(r"trainer_state\.json")


def _megatron_dcp(contents: FolderContents) -> Path | None:
    """Megatron-LM's state dict, with one entry for each layer, saved by torch itself."""
    names = contents.distributed_names
    is_megatron = "checkpoint_version" in names and _any(LAYER_OF_MEGATRON, names)
    return contents.path / INDEX if is_megatron and not contents.has("metadata.json") else None


def _distributed(contents: FolderContents) -> Path | None:
    """Any checkpoint of torch.distributed, but for Megatron Core's."""
    names = contents.distributed_names
    is_core = contents.has("metadata.json") or contents.has("common.pt")
    is_core = is_core or any("embedding.word_embeddings" in name for name in names)
    is_written = contents.first(r".*\.distcp") is not None
    return contents.path / INDEX if names and is_written and not is_core else None


def _without_config(contents: FolderContents) -> Path | None:
    """Weights of a model of transformers alone."""
    if "model_type" in contents.values("config.json"):
        return None
    paths = contents.matching(r"(model|pytorch_model)(-\d+-of-\d+)?\.(safetensors|bin)")
    return _first(paths, lambda path: _any(NAMES_OF_TRANSFORMERS, tensor_names(path)))


def _tensorflow(contents: FolderContents) -> Path | None:
    pattern = r"flax_model(-\d+-of-\d+)?\.msgpack|tf_model(-\d+-of-\d+)?\.h5|.*\.ckpt(-\d+)?\.index"
    return contents.first(pattern)


def _safetensors(contents: FolderContents) -> Path | None:
    return _first(contents.matching(r".*\.safetensors"), lambda path: bool(tensor_names(path)))


def _torch_files(contents: FolderContents) -> Path | None:
    return _first(contents.matching(TORCH_FILE), is_torch_file)


def _any(pattern: re.Pattern[str], names: Iterable[str]) -> bool:
    return any(pattern.fullmatch(name) for name in names)


def _first(paths: Iterable[Path], is_wanted: Callable[[Path], bool]) -> Path | None:
    """The first of a few files that is of a format."""
    files = (path for path in paths if path.is_file())
    candidates = (
        path for path, _ in zip(files, range(FILES_READ), strict=False) if is_wanted(path)
    )
    return next(candidates, None)


ALIKE = (
    ForeignFormat("foreign-adapter", "PEFT", _adapter),
    ForeignFormat("foreign-lingua", "Meta Lingua", _lingua),
    ForeignFormat("foreign-composer", "Composer", _composer_folder),
    ForeignFormat("foreign-lightning", "PyTorch Lightning", _lightning_folder),
    ForeignFormat("foreign-olmo", "OLMo", _olmo),
    ForeignFormat("foreign-fsdp", "FSDP of accelerate, sharded", _fsdp),
    ForeignFormat("foreign-megatron-bridge", "Megatron Bridge", _bridge),
    ForeignFormat("foreign-nemo-2", "NeMo 2", _nemo_2_weights),
    ForeignFormat("foreign-nemo-1", "NeMo 1", _nemo_1_folder),
    ForeignFormat("foreign-deepspeed", "DeepSpeed", _deepspeed),
    ForeignFormat("foreign-deepspeed-universal", "DeepSpeed's universal", _universal),
    ForeignFormat("foreign-megatron-dcp", "Megatron-LM's FSDP", _megatron_dcp),
    ForeignFormat("foreign-levanter", "Levanter", _levanter),
    ForeignFormat("foreign-mlx", "MLX, quantized", _mlx_quantized),
    ForeignFormat("foreign-distributed", "torch.distributed", _distributed),
)
"""Folders that look like checkpoints that are read, and are compared before these. A program comes
before the libraries that it saves with."""
CERTAIN = (
    ForeignFormat("foreign-litgpt-adapter", "litgpt, adapters", _litgpt),
    ForeignFormat("foreign-nanochat", "nanochat", _nanochat),
    ForeignFormat("foreign-nanogpt", "nanoGPT", _nanogpt),
    ForeignFormat("foreign-llm-c", "llm.c", _llm_c),
    ForeignFormat("foreign-composer", "Composer", _composer),
    ForeignFormat("foreign-nemo-2", "NeMo 2", _nemo_2),
    ForeignFormat("foreign-nemo-1", "NeMo 1", _nemo_1),
    ForeignFormat("foreign-lightning", "PyTorch Lightning", _lightning),
    ForeignFormat("foreign-fsdp-file", "FSDP of accelerate, one file", _fsdp_file),
    ForeignFormat("foreign-accelerate", "accelerate", _accelerate),
    ForeignFormat("foreign-maxtext", "MaxText", _maxtext),
    ForeignFormat("foreign-orbax", "Orbax", _orbax),
    ForeignFormat("foreign-meta", "Meta's Llama", _meta),
    ForeignFormat("foreign-mistral", "Mistral's own files", _mistral),
    ForeignFormat("foreign-mlx-adapter", "MLX, adapters", _mlx_adapter),
    ForeignFormat("foreign-mlx-numpy", "MLX, numpy's format", _mlx_numpy),
    ForeignFormat("foreign-tensorflow", "TensorFlow and Flax", _tensorflow),
    ForeignFormat("foreign-without-config", "transformers, weights alone", _without_config),
)
"""Files that show a program, and may be next to a checkpoint that is read."""
GENERAL = (
    ForeignFormat("foreign-trainer", "transformers' Trainer", _trainer),
    ForeignFormat("foreign-safetensors", "safetensors", _safetensors),
    ForeignFormat("foreign-torch-files", "torch.save", _torch_files),
)
"""Files that show no program: they are not looked for in the folders below one."""
