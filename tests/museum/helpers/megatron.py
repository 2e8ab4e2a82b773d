"""Megatron Core without a GPU, and its datasets."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import torch
import torch._dynamo
import torch._inductor.runtime.triton_compat  # before there is a stand-in for triton


class StandIn(ModuleType):
    """A module that is imported, but whose functions are not called on a CPU."""

    __path__ = ()
    __version__ = "3.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else lambda function: function


def load() -> None:
    """Puts a stand-in for triton, which versions from 0.18 on import, where it is missing."""
    if importlib.util.find_spec("triton") is None:
        for name in ("triton", "triton.language"):
            sys.modules[name] = StandIn(name)
            sys.modules[name].__spec__ = importlib.util.spec_from_loader(name, None)


load()


def samples(folder: Path, documents: Sequence[Sequence[int]], length: int, pad: int) -> Any:
    """The training samples of documents, with a tokenizer that pads with the token `pad`."""
    from megatron.core.datasets import gpt_dataset, indexed_dataset
    from megatron.core.datasets.utils import Split

    names = vars(indexed_dataset)
    prefix = str(folder / "tokens")
    builder_type = names.get("IndexedDatasetBuilder") or names["MMapIndexedDatasetBuilder"]
    builder = builder_type(f"{prefix}.bin", dtype=indexed_dataset.numpy.int32)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(f"{prefix}.idx")
    files = (names.get("IndexedDataset") or names["MMapIndexedDataset"])(prefix)
    settings = {
        "random_seed": 1,
        "sequence_length": length,
        "blend": ([prefix], None),
        "split": "1,0,0",
        "path_to_cache": str(folder / "cache"),
        "tokenizer": SimpleNamespace(pad=pad, eod=0, bos=0, vocab_size=10, unique_identifiers={}),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
    }
    config_type = gpt_dataset.GPTDatasetConfig
    known = {field.name for field in dataclasses.fields(config_type) if field.init}
    config = config_type(**{name: settings[name] for name in settings.keys() & known})
    indexes = indexed_dataset.numpy.arange(len(documents), dtype="int32")
    count = sum(map(len, documents)) // length
    return gpt_dataset.GPTDataset(files, prefix, indexes, count, Split.train, config)
