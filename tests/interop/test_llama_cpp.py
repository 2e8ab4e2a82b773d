"""GGUF files in llama.cpp's runtime, xllamacpp's wheel: `make test-interop`.

A machine without the wheel skips these tests.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional

from megatron_ds.conversion.gguf.read_write import write_gguf
from megatron_ds.conversion.huggingface.read_write import open_hf
from megatron_ds.conversion.source import SourceCheckpoint
from megatron_ds.tokenizer import Tokenizer, build_tokenizer
from tests.unit.conversion.hf_models import EAGER, MODELS, randomize
from tests.unit.conversion.models import logits
from tests.unit.conversion.test_exported_tokenizers import TEXTS, config_of
from tests.unit.conversion.test_gguf import (
    CHANGES,
    COMPUTED,
    SPM,
    TABLES,
    byte_level,
    with_library,
    with_tokenizer,
)
from tests.unit.tokenizer.test_sentencepiece import trained

pytestmark = [
    pytest.mark.interop,
    pytest.mark.skipif(
        importlib.util.find_spec("xllamacpp") is None, reason="no wheel of xllamacpp is installed"
    ),
]

GELU = functional.gelu
RUNNER = Path(__file__).with_name("llama_cpp.py")
TOKENS = 128
ROWS = 64
WINDOW = 16
"""Tokens of a window, so that an ignored one shows."""
EQUAL = 1e-3
"""Difference of two log probabilities in fp32."""
ROUNDED = 5e-3
"""The same of models with GELU, which the runtime looks up in a table of 16 bits: an input at the
edge of two entries may get the other one."""
TABLED = 10
"""Largest input of GELU that is in the table."""
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2-layers": ("gemma2", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "gemma3-layers": ("gemma3", {"layer_types": ["full_attention", "sliding_attention"] * 3}),
    "olmo3-layers": ("olmo3", {"layer_types": ["full_attention", "sliding_attention"] * 2}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True}),
    "pythia-tied": ("pythia", {"tie_word_embeddings": True}),
    "olmo2-tied": ("olmo2", {"tie_word_embeddings": True}),
    "gpt2-ffn": ("gpt2", {"n_inner": 48, "tie_word_embeddings": False}),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
}
SIZES = {
    "hidden_size": 64, "n_embd": 64, "vocab_size": ROWS, "intermediate_size": 96,
    "max_position_embeddings": 256, "n_positions": 256, "head_dim": 32, "sliding_window": WINDOW,
    "moe_intermediate_size": 32, "qk_nope_head_dim": 16, "v_head_dim": 16, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "q_lora_rank": 32, "query_pre_attn_scalar": 32,
}  # fmt: skip
FRAGMENTS = (
    "a", "B", "é", "Ä", " ", "  ", "\n", "\r\n", "\t", "'s", "'RE", "1", "23", "4567", "٣", "½",
    "中", "国", "の", "ไท", "\u00a0", "!", "...", "_", "<", "/", "😀", "Word", "HELLO", "ǅ",
    "\u2028",
)  # fmt: skip


def run(path: Path, ids: Sequence[int] = (), texts: Sequence[str] = (), **options: Any) -> Any:
    """What the runtime gives for a file."""
    job = {"model": str(path), "ids": [*ids], "texts": [*texts], "special": False, **options}
    job["out"] = str(path.with_suffix(".npz"))
    path.with_suffix(".json").write_text(json.dumps(job))
    command = [sys.executable, str(RUNNER), str(path.with_suffix(".json"))]
    subprocess.run(command, check=True, timeout=300)
    return np.load(job["out"])


def enlarged(name: str, folder: Path) -> SourceCheckpoint:
    """A model of a family with heads of 16 or 32 dimensions, more than a window's tokens long."""
    name, more = MORE.get(name, (name, {}))
    family, arguments = MODELS[name]
    values = {**arguments, **CHANGES.get(name, {})}
    present = {key for key, value in values.items() if value is not None}
    is_gpt = "n_embd" in values
    defaults = {"vocab_size"} if is_gpt else {"vocab_size", "hidden_size"}
    values |= {key: size for key, size in SIZES.items() if key in present | defaults}
    if not is_gpt and family != "BloomConfig":
        values["max_position_embeddings"] = 256
    if "layer_types" in more:
        values["num_hidden_layers"] = len(more["layer_types"])
    config = getattr(transformers, family)(**{**values, **more})
    model = transformers.AutoModelForCausalLM.from_config(config, **EAGER).eval()
    randomize(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.3)
    model.save_pretrained(folder / "hf")
    return open_hf(folder / "hf")


def tabled_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU as the runtime computes it: from 16 bits to 16 bits, in the tanh form."""
    inner = GELU(x.half().float(), approximate="tanh").half().float()
    return torch.where(x <= -TABLED, 0.0, torch.where(x >= TABLED, x, inner))


@pytest.mark.parametrize("name", [*COMPUTED, *MORE])
def test_the_runtime_computes_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim (conversion): llama.cpp computes the log probabilities of a GGUF file's model, for each
    family that it has, with windows, scaled positions, biases, experts and tied embeddings: within
    1e-3, or 5e-3 of the model with its rounded GELU
    """
    source = enlarged(name, tmp_path)
    monkeypatch.setattr(functional, "gelu", tabled_gelu)
    write_gguf(source, tmp_path / "model.gguf")
    ids = torch.randint(0, ROWS, (1, TOKENS), generator=torch.Generator().manual_seed(3))
    expected = logits(source, ids)[0].log_softmax(-1)
    theirs = torch.from_numpy(run(tmp_path / "model.gguf", ids[0].tolist())["logits"])
    error = float((theirs.log_softmax(-1) - expected).abs().max())
    assert error < (ROUNDED if source.settings.model.has_gelu else EQUAL)


def texts_of(seed: int) -> list[str]:
    """Texts of tests, and random ones."""
    generator = random.Random(seed)
    lengths = [generator.randint(1, 12) for _ in range(400)]
    drawn = ["".join(generator.choice(FRAGMENTS) for _ in range(length)) for length in lengths]
    return [text for text in (*TEXTS, *drawn) if text]


def assert_same_ids(
    source: SourceCheckpoint, folder: Path, tokenizer: Tokenizer, *, special: bool
) -> None:
    write_gguf(source, folder / "model.gguf")
    texts = texts_of(4)
    ids = json.loads(str(run(folder / "model.gguf", texts=texts, special=special)["ids"]))
    pairs = zip(texts, ids, strict=True)
    expected = ((text, own, tokenizer.begin(tokenizer.encode(text))) for text, own in pairs)
    assert [entry for entry in expected if entry[1] != entry[2]] == []


@pytest.mark.parametrize(("splits", "has_own", "ignore_merges", "pre"), TABLES["splits"])
def test_an_own_vocabulary_has_the_ids_of_the_run(
    splits: list[str], has_own: bool, ignore_merges: bool, pre: str, tmp_path: Path
) -> None:
    """Claim (conversion): llama.cpp's tokenizer gives the ids of the run, for vocabularies of one's
    own with each known regular expression and for SentencePiece models that are not refused
    """
    library = byte_level(splits, has_own=has_own, ignore_merges=ignore_merges)
    source = with_library(library, tmp_path)
    config = source.settings.tokenizer_config
    assert config is not None
    assert_same_ids(source, tmp_path, build_tokenizer(config), special=True)


@pytest.mark.parametrize("name", ["gpt2", "tokenizer.json", "tiktoken-v1", "unigram", "bpe"])
def test_a_tokenizer_of_a_run_has_its_ids(name: str, tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    if name == "bpe":
        options = {"model_type": "bpe", "vocab_size": 400, "byte_fallback": True, **SPM}
        path = trained(tmp_path / "identity.model", **options)
        config = dataclasses.replace(config, tokenizer_model=path)
    source = with_tokenizer(config, 0 if name == "tiktoken-v1" else 3)
    assert_same_ids(source, tmp_path, build_tokenizer(config), special=name == "tokenizer.json")
