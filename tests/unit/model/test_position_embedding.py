"""Rope, ALiBi and the causal mask."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch.nn.attention import SDPBackend
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from megatron_ds.config import ModelConfig
from megatron_ds.model.attention.cores import SDPA, UlyssesAttention
from megatron_ds.model.attention.masks import alibi_slopes, score_bias
from megatron_ds.model.attention.packed import Keys
from megatron_ds.model.attention.rule import Rope, attention_rules
from megatron_ds.model.position_embedding import PositionEncoder, rope_rates, rope_table, rotate
from megatron_ds.parallel.mesh import Group, Mesh
from tests.observed import Observed
from tests.tables import tables
from tests.unit.model.dense import TINY

TABLES = tables(__file__)

CPU = torch.device("cpu")


def test_alibi_slopes_are_those_of_the_paper() -> None:
    assert alibi_slopes(8) == [2.0**-power for power in range(1, 9)]
    # For 12 heads: those of 8, then every other one of 16.
    assert alibi_slopes(12)[8:] == pytest.approx([2.0**-0.5, 2.0**-1.5, 2.0**-2.5, 2.0**-3.5])


def test_alibi_slopes_follow_the_heads_of_the_rank() -> None:
    config = ModelConfig(**TINY, seq_length=4, position_embedding_type="alibi")

    def bias(tp: int = 0, sp: int = 0, tp_size: int = 1, ulysses_size: int = 1) -> torch.Tensor:
        groups = {
            "tp": Group(tuple(range(tp_size)), tp, None),
            "ulysses": Group(tuple(range(ulysses_size)), sp, None),
        }
        mesh = dataclasses.replace(Mesh.single(), **groups)
        rule = attention_rules(config)[0]
        keys = Keys(4, torch.float32, CPU)
        core = PositionEncoder(config, mesh).contexts({0: rule}, keys)[0].core
        core = core.core if isinstance(core, UlyssesAttention) else core
        assert isinstance(core, SDPA)
        return core.bias

    shards = [bias(tp, 0, 2) for tp in (0, 1)]
    assert torch.equal(torch.cat(shards), bias())
    shards = [bias(tp, sp, 2, 2) for tp in (0, 1) for sp in (0, 1)]
    assert torch.equal(torch.cat(shards), bias())


YARN = {"position_embedding_type": "yarn", "rotary_scaling_factor": 32.0}
YARN |= {"yarn_original_max_position_embeddings": 4096}
LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
SCALINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = TABLES["scalings"]  # fmt: skip
"""Our options, and transformers' parameters of rope."""


@pytest.mark.parametrize("base", [10000.0, 500000.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_rates_of_rope_are_those_of_transformers(name: str, base: float) -> None:
    """Claim (parallel): the rates of rotary positions and the factor of what is rotated are
    transformers', for each type of scaling"""
    ours, theirs = SCALINGS[name]
    sizes = {"num_layers": 1, "hidden_size": 128, "num_attention_heads": 2, "seq_length": 64}
    options = {**sizes, "position_embedding_type": "rope", "rotary_base": base, **ours}
    config = ModelConfig(**options)
    assert list(config.rope_problems()) == []
    rope = attention_rules(config)[0].rope
    assert rope is not None
    their_config = transformers.LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        max_position_embeddings=64,
        rope_parameters={**theirs, "rope_theta": base},
    )
    compute = ROPE_INIT_FUNCTIONS[theirs["rope_type"]]
    rates, amplitude = compute(their_config, CPU, seq_len=config.seq_length)
    assert torch.allclose(rope_rates(rope, CPU), rates, rtol=1e-6, atol=0)
    assert (rope.scaling.amplitude if rope.scaling else 1.0) == pytest.approx(amplitude, abs=1e-12)
    table = rope_table(5, rope, CPU)
    assert torch.allclose(table.cos[4, 0, 0, :32], (4 * rates).cos() * amplitude, atol=1e-6)
    assert torch.allclose(table.sin[4, 0, 0, 32:], (4 * rates).sin() * amplitude, atol=1e-6)


def test_rope_is_exact_in_bf16_runs() -> None:
    """bf16 cannot represent all positions beyond 256, so the table must not be bf16."""
    x = torch.randn(512, 1, 1, 8).bfloat16()
    table = rope_table(512, Rope(10000.0, 8), CPU)
    error = rotate(x, table).float() - rotate(x.float(), table)
    assert error.abs().max() < 2e-2


class LiveBytes(Observed):
    """Records the largest number of bytes of all tensors made inside that exist at a time."""

    def __init__(self) -> None:
        super().__init__(self._record)
        self.live = 0
        self.peak = 0

    def _record(self, operator: Any, args: tuple[Any, ...], out: Any) -> None:
        if isinstance(out, torch.Tensor) and not out._is_view() and all(out is not a for a in args):
            self.live += out.nbytes
            self.peak = max(self.peak, self.live)
            weakref.finalize(out, self._free, out.nbytes)

    def _free(self, size: int) -> None:
        self.live -= size


def test_alibi_table_is_made_in_its_memory() -> None:
    slopes = alibi_slopes(32)
    with LiveBytes() as memory:
        bias = score_bias(slopes, 64, CPU, torch.bfloat16)
    assert bias.nbytes <= memory.peak < 1.3 * bias.nbytes
    assert torch.equal(bias, score_bias(slopes, 64, CPU).bfloat16())


@pytest.mark.parametrize("kind", ["cpu", "meta"])
def test_alibi_with_grouped_queries_stores_no_scores(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernels take groups with a bias on a CPU only, and there only in 4 dimensions."""
    calls: list[Any] = []

    def record(q: Any, k: Any, v: Any, bias: Any, *_: Any, enable_gqa: bool, **__: Any) -> Any:
        calls.append((k.shape, v.shape, bias.shape, enable_gqa))
        return q

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    q = torch.empty(2, 4, 8, 16, device=kind)
    k = torch.empty(2, 2, 8, 16, device=kind)
    SDPA(torch.empty(4, 8, 8, device=kind)).attend(q, k, k, 0.0)
    heads = 2 if kind == "cpu" else 4
    assert calls == [((2, heads, 8, 16), (2, heads, 8, 16), (1, 4, 8, 8), kind == "cpu")]


def test_kernel_is_fused_for_alibi_with_grouped_queries() -> None:
    q = torch.empty(2, 4, 8, 16)
    k = torch.empty(2, 2, 8, 16)
    choice = torch._fused_sdp_choice(q, k, k, attn_mask=torch.empty(1, 4, 8, 8), enable_gqa=True)
    assert SDPBackend(choice) == SDPBackend.FLASH_ATTENTION
