"""The models that are measured, and the limits of a device that their figures relate to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_ds.config import ModelConfig

PEAK_TFLOPS = 989.0
"""Dense bf16 rate of an H100 or H200 (SXM) by its data sheet, in 10^12 operations per second."""


@dataclass(frozen=True)
class Goal:
    """What the default command aims at on one H200 in bf16 without dropout."""

    tokens_per_second: float | None = None
    mfu: float | None = None

    def __str__(self) -> str:
        parts = []
        if self.tokens_per_second is not None:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.mfu is not None:
            parts.append(f"{self.mfu:.0%} MFU")
        return " and ".join(parts) or "none"


@dataclass(frozen=True)
class GptSize:
    """Shape of a GPT, and the micro-batches that are tried."""

    layers: int
    hidden: int
    heads: int
    sequence: int
    micro_batches: tuple[int, ...]
    """In the order in which they are tried: the first that fits is measured."""
    goal: Goal = Goal()
    vocab: int = 50257
    architecture: Mapping[str, object] = field(default_factory=dict)
    """Fields of ModelConfig beyond GPT-2's."""
    experts: Mapping[str, Any] = field(default_factory=dict)
    """Fields of MoEConfig."""
    flags: Mapping[str, object] = field(default_factory=dict)
    """Flags of the run beyond the common ones."""
    smallest_gib: Mapping[int, float] = field(default_factory=dict)
    """Micro-batch -> memory of a device below which it is not tried, where that is known."""
    global_batch: int | None = None
    """Samples of a step. None: one micro-batch."""

    @property
    def is_gpt2(self) -> bool:
        """Whether the bare loops can train it."""
        return not (self.architecture or self.experts)

    def micro_batches_for(self, gib: float) -> tuple[int, ...]:
        """Micro-batches to try on a device of so much memory."""
        fitting = [each for each in self.micro_batches if gib >= self.smallest_gib.get(each, 0)]
        return tuple(fitting or self.micro_batches[-1:])

    def config(self) -> ModelConfig:
        """The model, without dropout."""
        from megatron_ds.config import ModelConfig

        return ModelConfig(
            num_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.heads,
            seq_length=self.sequence,
            vocab_size=self.vocab,
            **self.architecture,  # type: ignore[arg-type]
        )

    def command(self) -> dict[str, object]:
        """Flags of the model."""
        model = {name: value for name, value in self.architecture.items() if value is not False}
        return {
            "num_layers": self.layers,
            "hidden_size": self.hidden,
            "num_attention_heads": self.heads,
            "seq_length": self.sequence,
            "disable_bias_linear": not self.architecture.get("add_bias_linear", True),
            **model,
            **{name: value for name, value in self.experts.items() if name != "num_experts"},
            **({"num_experts": self.experts["num_experts"][0]} if self.experts else {}),
            **self.flags,
        }

    def flops_per_token(self, *, is_causal: bool = False) -> float:
        """Operations of the matrix products of a token's forward and backward pass.

        Args:
            is_causal: The causal mask halves attention, as in Megatron-LM's program.
        """
        from megatron_ds.config import MoEConfig
        from megatron_ds.model.declaration.architecture import model_spec

        spec = model_spec(self.config(), MoEConfig(**self.experts))
        return spec.flops(self.sequence, is_causal=is_causal) / self.sequence


LLAMA = {
    "activation": "swiglu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
}
LLAMA_8B = {
    **LLAMA,
    "num_query_groups": 8,
    "ffn_hidden_size": 14336,
    "untie_embeddings_and_output_weights": True,
}
BF16_STATES = {
    "zero_stage": 2,
    "bf16_master_weights": True,
    "bf16_stochastic_round": True,
    "no_accumulate_allreduce_grads_in_fp32": True,
}
SIZES = {
    "tiny": GptSize(2, 64, 4, 32, (2,), vocab=257),
    "tiny-llama": GptSize(
        2, 64, 4, 32, (2,), vocab=257, architecture={**LLAMA, "num_query_groups": 2}
    ),
    "124m": GptSize(12, 768, 12, 1024, (64, 32, 16, 8), Goal(470_000)),
    "345m": GptSize(24, 1024, 16, 1024, (32, 16, 8, 4), Goal(190_000)),
    "345m-2048": GptSize(24, 1024, 16, 2048, (16, 8, 4, 2), Goal(165_000)),
    "1.3b": GptSize(24, 2048, 16, 2048, (16, 8, 4, 2), Goal(54_000), smallest_gib={16: 90}),
    # The shape of MiniCPM4-0.5B.
    "llama-0.5b": GptSize(
        24,
        1024,
        16,
        4096,
        (8, 4, 2, 1),
        Goal(mfu=0.44),
        vocab=73448,
        architecture={**LLAMA, "num_query_groups": 2, "ffn_hidden_size": 4096},
        smallest_gib={8: 90},
    ),
    # Gemma's pattern: three layers of four see the last 1,024 tokens.
    "windows-0.5b": GptSize(
        24,
        1024,
        16,
        8192,
        (4, 2, 1),
        vocab=73448,
        architecture={
            **LLAMA,
            "num_query_groups": 2,
            "ffn_hidden_size": 4096,
            "window_size": "1023,0",
            "window_attn_skip_freq": "4",
        },
    ),
    "experts-1b": GptSize(
        12,
        1024,
        16,
        2048,
        (16, 8, 4),
        vocab=50257,
        architecture={**LLAMA, "num_query_groups": 4},
        experts={"num_experts": (32,), "moe_router_topk": 4, "moe_ffn_hidden_size": 1024},
    ),
    # The shape of Llama 3 8B. AdamW's moments in fp32 need 64 GB more than one H200 has, so the run
    # has fp32 gradients and master weights but no moments.
    "llama-8b": GptSize(
        32,
        4096,
        32,
        4096,
        (1,),
        Goal(9_300),
        vocab=128256,
        architecture=LLAMA_8B,
        flags={"optimizer": "sgd", "sgd_momentum": 0, "recompute_activations": True},
        global_batch=8,
    ),
    # AdamW with weights, gradients and moments in bf16.
    "llama-8b-bf16": GptSize(
        32,
        4096,
        32,
        4096,
        (2, 1),
        Goal(10_500),
        vocab=128256,
        architecture=LLAMA_8B,
        flags={**BF16_STATES, "recompute_activations": True},
        global_batch=8,
    ),
    "tiny-bf16": GptSize(
        2,
        64,
        4,
        32,
        (2,),
        vocab=257,
        architecture={**LLAMA, "num_query_groups": 2},
        flags=BF16_STATES,
        global_batch=4,
    ),
}
