"""Small models whose next token varies with the context."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeVar

from megatron_ds.config import ModelConfig
from megatron_ds.model.gpt import GPTModel
from megatron_ds.parallel.mesh import Mesh
from megatron_ds.parallel.rng import RngStreams

T = TypeVar("T")
VOCAB = 90  # of 96 padded rows
EOD = 89


LLAMA = {"activation": "swiglu", "normalization": "RMSNorm", "add_bias_linear": False}
KINDS: dict[str, dict[str, Any]] = {
    "learned": {"position_embedding_type": "learned_absolute"},
    "rope": {"position_embedding_type": "rope", "rotary_percent": 0.5},
    "alibi": {"position_embedding_type": "alibi", "num_query_groups": 2},
    "none": {"position_embedding_type": "none", "untie_embeddings_and_output_weights": True},
    "learned-gqa": {"position_embedding_type": "learned_absolute", "num_query_groups": 2},
    "rope-gqa": {
        "position_embedding_type": "rope",
        "num_query_groups": 2,
        "activation": "swiglu",
        "normalization": "RMSNorm",
        "add_bias_linear": False,
    },
}
"""All position embeddings, with and without grouped queries."""


def config_of(kind: str, **changes: Any) -> ModelConfig:
    shape: dict[str, Any] = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    shape |= {"ffn_hidden_size": 48, "seq_length": 40, "init_method_std": 0.4}
    shape |= {"vocab_size": VOCAB, "make_vocab_size_divisible_by": 48}
    shape |= {"attention_dropout": 0.3, "hidden_dropout": 0.3}  # off in evaluation mode
    return ModelConfig(**{**shape, **KINDS[kind], **changes})


def model_of(kind: str, mesh: Mesh | None = None, **changes: Any) -> GPTModel:
    mesh = Mesh.single() if mesh is None else mesh
    config = config_of(kind, **changes)
    assert list(config.problems(mesh.tp.size)) == []
    return GPTModel(config, mesh=mesh, rng=RngStreams(mesh.tp.rank), seed=11).eval()


def result_of(steps: Generator[None, None, T]) -> T:
    """What a computation in steps returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
