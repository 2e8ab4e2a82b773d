"""Checkpoints of runs as files of llama.cpp, in its runtime: `make test-interop`."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from megatron_ds.conversion.gguf.read_write import open_gguf
from megatron_ds.conversion.registry import open_source
from megatron_ds.conversion.source import ReadOptions, SourceCheckpoint
from megatron_ds.loading.programs.convert import convert_checkpoint
from megatron_ds.loading.programs.convert_options import Options
from megatron_ds.tokenizer import build_tokenizer
from tests.e2e.conftest import write_corpus
from tests.e2e.runs import Launcher
from tests.interop.test_llama_cpp import run
from tests.unit.conversion.models import assert_same_tensors, logits
from tests.unit.tokenizer.test_golden import FOLDER

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="no wheel of xllamacpp is installed"
    ),
]

TEXT = (
    "The quick brown fox jumps over 12 lazy dogs, and it's 3 o'clock.\n\n  Then all of it again.\n"
)
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
EQUAL = {"fp32": 2e-5, "bf16": 0.05, "fp16": 5e-3, "q8_0": 0.15}
"""Difference of two log probabilities. The runtime rounds the inputs of products to the type of
the matrices, or to 8 bits."""
SETTINGS = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "group_query_attention": True,
    "num_query_groups": 2, "ffn_hidden_size": 96, "seq_length": 64, "max_position_embeddings": 64,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "swiglu": True,
    "disable_bias_linear": True, "untie_embeddings_and_output_weights": True,
    "init_method_std": 0.1, "lr": 0.01, "micro_batch_size": 2, "global_batch_size": 4,
    "train_iters": 3, "save_interval": 3, "eval_iters": 0, "num_workers": 0, "split": "1",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run on two tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("run")
    files = {"vocab_file": FOLDER / "vocab.json", "merge_file": FOLDER / "merges.txt"}
    corpus = write_corpus(folder / "tokens", 300, seed=0, step=1)
    settings = {**SETTINGS, **files, "data_path": corpus, "save": folder / "save"}
    launcher = Launcher(tmp_path_factory.mktemp("output"))
    launcher.start({**settings, "tensor_model_parallel_size": 2}, ranks=2).succeed()
    return folder / "save"


@pytest.fixture(scope="module")
def source(checkpoint: Path) -> SourceCheckpoint:
    return open_source(checkpoint, options=ReadOptions(masters=True))


@pytest.mark.parametrize("dtype", EQUAL)
def test_the_runtime_computes_a_run(
    dtype: str, checkpoint: Path, source: SourceCheckpoint, tmp_path: Path
) -> None:
    """Claim (conversion): llama.cpp gives the ids of a run for a text and computes the log
    probabilities of its checkpoint, from a GGUF file in fp32 to 2e-5, and in bf16, fp16 and q8_0
    with the rounding of these types; the file is read back as the rounded weights
    """
    path = tmp_path / "model.gguf"
    convert_checkpoint(
        Options(load=str(checkpoint), save=str(path), target_format="gguf", dtype=dtype)
    )
    again = open_gguf(path)
    if dtype in TYPES:
        expected = source.to(TYPES[dtype])
        assert_same_tensors(again, expected)
    else:
        expected = again
        for name, tensor in source.tensors.items():
            value = tensor.read()
            error = (again.tensors[name].read() - value).abs().max()
            assert error <= value.abs().max() / 127 * 0.57, name
    config = source.settings.tokenizer_config
    stored = again.settings.tokenizer_config
    assert config is not None
    assert stored is not None
    tokenizer = build_tokenizer(config)
    ids = tokenizer.encode(TEXT)[:48]
    assert build_tokenizer(stored).encode(TEXT)[:48] == ids
    result = run(path, ids, [TEXT])
    assert json.loads(str(result["ids"]))[0][:48] == ids
    theirs = torch.from_numpy(result["logits"]).log_softmax(-1)
    own = logits(expected, torch.tensor([ids]))[0].log_softmax(-1)
    error = float((theirs - own).abs().max())
    assert error < EQUAL[dtype]


def test_a_run_starts_from_a_file(checkpoint: Path, tmp_path: Path) -> None:
    """With the file's tokenizer, which its checkpoints keep without the weights."""
    path = tmp_path / "model.gguf"
    convert_checkpoint(Options(load=str(checkpoint), save=str(path), target_format="gguf"))
    corpus = write_corpus(tmp_path / "tokens", 300, seed=0, step=1)
    schedule = ("lr", "micro_batch_size", "global_batch_size", "train_iters", "eval_iters", "split")
    settings = {name: SETTINGS[name] for name in schedule} | {"num_workers": 0}
    launcher = Launcher(tmp_path)
    paths = {"load": path, "save": tmp_path / "save", "data_path": corpus}
    launcher.start({**settings, **paths, "save_interval": 3}).succeed()
    path.unlink()
    again = open_source(tmp_path / "save").settings.tokenizer_config
    config = open_source(checkpoint).settings.tokenizer_config
    assert again is not None
    assert config is not None
    assert again.tokenizer_type == "HFTokenizer"
    assert build_tokenizer(again).encode(TEXT) == build_tokenizer(config).encode(TEXT)
    assert list((tmp_path / "save").rglob("*.gguf")) == []
