"""Options of muP: sizes of the base model whose rates, deviations and multipliers are transferred.

The names and formulas for the width are Megatron-LM's; those for the depth are of CompleteP (Dey et
al. 2025). docs/training/mup.md has the tables.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ds.config.fields import Decides, exclusive_problem, option_field, when
from megatron_ds.config.model.architecture import ResidualConfig, SizesConfig, VocabularyConfig
from megatron_ds.config.model.attention import AttentionConfig
from megatron_ds.config.problems import Problem, with_value
from megatron_ds.dataclass import dataclass

MUP = when(use_mup=True)
FACTORS = ("embedding_multiplier", "residual_multiplier", "logits_multiplier")
"""Options of the multipliers that muP sets."""
FARTHEST = 1024
"""Largest ratio of sizes to those of the base model, or theirs to these: width 16,384 and 16."""
LARGE_RATE = 0.1
"""Rate of matrices from which it is most likely a typing error."""
LARGE_LOGITS = 10.0
"""Deviation of the first logits from which the loss starts tens of nats too high."""


@dataclass(frozen=True)
class TransferConfig(VocabularyConfig, ResidualConfig, AttentionConfig, SizesConfig):
    """Maximal update parametrization (muP, Yang et al. 2022)."""

    use_mup: bool = option_field(False)
    """Scale initial weights, learning rates and multipliers by the ratio of the hidden size to that
    of a base model, for which --lr and --init-method-std are meant; see docs/training/mup.md."""
    mup_base_hidden_size: int | None = option_field(None, minimum=1, only_with=MUP)
    """Hidden size of the base model (default: --hidden-size)."""
    mup_base_num_layers: int | None = option_field(None, minimum=1, only_with=MUP)
    """Layers of the base model: attention and MLP are added times base / layers, and Adam's epsilon
    is scaled alike, as in CompleteP (default: the depth is not scaled)."""
    mup_base_head_dim: float | None = option_field(None, minimum=1e-8, maximum=1e8, only_with=MUP)
    """Attention scores are multiplied by sqrt(this) / head dimension ^ power (default: 1)."""
    mup_attn_scale_power: float = option_field(1.0, minimum=0, maximum=10, only_with=MUP)
    """Power of the head dimension in the factor of the attention scores; 0.5 is ordinary
    attention."""
    mup_embedding_mult: float = option_field(1.0, minimum=1e-8, maximum=1e4, only_with=MUP)
    """Factor of the embedding's output."""
    mup_output_mult: float = option_field(1.0, minimum=1e-8, maximum=1e4, only_with=MUP)
    """Factor of the logits; 1 means base / hidden size."""
    mup_independent_weight_decay: bool = option_field(
        False, only_with=MUP, decides=Decides.TRAINING
    )
    """Decay each weight as if its learning rate were --lr, so that the decay does not depend on the
    width; without it the decay shrinks with the rate, as in Megatron."""

    @property
    def width_mult(self) -> float:
        """Ratio of the hidden size to the base model's; 1 without muP."""
        base = self.mup_base_hidden_size if self.use_mup else None
        return self.hidden_size / (base or self.hidden_size)

    @property
    def depth_mult(self) -> float:
        """Ratio of the number of layers to the base model's; 1 without depth transfer."""
        base = self.mup_base_num_layers if self.use_mup else None
        return self.num_layers / (base or self.num_layers)

    @property
    def has_depth_transfer(self) -> bool:
        """Whether the depth is scaled as well."""
        return self.use_mup and self.mup_base_num_layers is not None

    @property
    def residual_layers(self) -> float:
        """Layers by which the initial deviation of what writes to the residual stream is divided:
        with transfer over depths those of the base model, because a multiplier does the rest."""
        return self.num_layers / self.depth_mult

    @property
    def embedding_factor(self) -> float:
        """Factor of the embedding's output."""
        return self.mup_embedding_mult if self.use_mup else self.embedding_multiplier

    @property
    def residual_factor(self) -> float:
        """Factor of what attention and MLP add to the hidden states."""
        return 1 / self.depth_mult if self.has_depth_transfer else self.residual_multiplier

    @property
    def logits_factor(self) -> float:
        """Factor of the logits."""
        if not self.use_mup:
            return self.logits_multiplier
        return 1 / self.width_mult if self.mup_output_mult == 1.0 else self.mup_output_mult

    @property
    def score_scale(self) -> float | None:
        """Factor of the attention scores, without that of scaled rotary positions; None: 1 /
        sqrt(head dimension)."""
        if not self.use_mup or self.softmax_scale is not None:
            return self.softmax_scale
        base = 1.0 if self.mup_base_head_dim is None else self.mup_base_head_dim**0.5
        return float(base / self.head_dim**self.mup_attn_scale_power)

    def transfer_problems(self) -> Iterator[Problem]:
        """Check that nothing else sets what muP sets, and that the base model can be one."""
        if not self.use_mup:
            return
        for name in FACTORS:
            if getattr(self, name) != 1.0:
                yield exclusive_problem(name, "use_mup", reason="muP sets this factor")
        sizes = (("mup_base_hidden_size", "hidden_size"), ("mup_base_num_layers", "num_layers"))
        for base, size in sizes:
            if (value := getattr(self, base)) is None or min(value, getattr(self, size)) < 1:
                continue
            if not 1 / FARTHEST <= getattr(self, size) / value <= FARTHEST:
                yield Problem(
                    "mup-base-too-far",
                    base,
                    size,
                    base=with_value(self, base),
                    size=with_value(self, size),
                    farthest=FARTHEST,
                )

    def transfer_warnings(self, lr: float, output_std: float) -> Iterator[Problem]:
        """Warn of a base width and a factor of the logits that most likely mean something else.

        Args:
            lr: Learning rate of an optimizer whose steps it bounds; 0 of another one.
            output_std: Initial deviation of the output layer.
        """
        base = self.hidden_size if self.mup_base_hidden_size is None else self.mup_base_hidden_size
        if not self.use_mup or min(base, self.hidden_size, self.num_attention_heads) < 1:
            return
        if base < self.head_dim and base < self.hidden_size:
            yield Problem("mup-base-narrower-than-head", settings=self, head=self.head_dim)
        rate = lr / self.width_mult
        if lr < rate > LARGE_RATE:
            yield Problem("mup-rate-large", settings=self, rate=rate)
        deviation = self.logits_factor * output_std * self.hidden_size**0.5
        if self.mup_output_mult != 1.0 and deviation > LARGE_LOGITS:
            yield Problem("mup-logits-large", settings=self, deviation=deviation)
